"""The door: the commands of `bigstep`, one file each."""

from __future__ import annotations

from bigstep.cli.app import app, main

__all__ = ["app", "main"]
