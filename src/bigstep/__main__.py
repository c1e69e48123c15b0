"""The door: `python -m bigstep` is `bigstep`."""

from bigstep.cli import main

if __name__ == "__main__":
    main()
