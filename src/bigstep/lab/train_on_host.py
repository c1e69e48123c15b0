"""What a host of the network laboratory runs to train: `bigstep ARGUMENTS`, as one rank of all hosts.

The laboratory reads the last line that a host prints as JSON; rank 0 prints the result of the run, the others null.
"""

from __future__ import annotations

import os
import runpy

if __name__ == "__main__":
    try:
        runpy.run_module("bigstep", run_name="__main__")
    except SystemExit as leaving:
        if leaving.code:
            raise
    if os.environ["RANK"] != "0":
        print("null")
