"""The door: every command of `bigstep`, one a file."""

from __future__ import annotations

from bigstep.cli.app import app, main

__all__ = ["app", "main"]
