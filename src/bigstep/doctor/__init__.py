"""Examine somebody else's training script: run it on one rank and on several, and name what differs and why."""

from __future__ import annotations

from bigstep.doctor.examination import Examination, examine
from bigstep.doctor.finding import Finding

__all__ = ["Examination", "Finding", "examine"]
