"""Examples of docstrings as code: ours follow the text without a heading, and Markdown would take them for quotes."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1\S.*|\n\1 +\S.*)*", flags=re.M)


class Doctests(griffe.Extension):
    """Put every example into a fence, and take away the double colon that announces an equation."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring and obj.docstring.value.strip() == "See the class.":
            obj.docstring = None  # what an __init__ says; its signature stands with the class
        elif obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    r"""Return a docstring whose examples are fenced.

    >>> fenced("Twice.\n\n>>> twice(2)\n4\n\nMore.")
    'Twice.\n\n```pycon\n>>> twice(2)\n4\n```\n\nMore.'
    """
    text = re.sub(r"^ *::\n(?=\n)", "", text, flags=re.M)
    return EXAMPLE.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text)
