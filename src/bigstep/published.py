"""What papers reported, as data that recipes carry and reports show beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Published"]


@dataclass(frozen=True, kw_only=True)
class Published:
    """What a paper reported, to stand beside what is measured here."""

    system: str
    """Short name of the system."""
    source: str
    """Authors, title, year, arXiv number."""
    hardware: str
    """Processors and network."""
    batch: str
    """Global batch as printed, with its stages."""
    accuracy: float | None
    """Top-1 accuracy on `data` as a fraction; None where the paper reports something else."""
    seconds: float | None
    """Time of the whole run; None where it is only in a figure."""
    data: str = ""
    """What it was trained on; empty means ImageNet if there is an accuracy, and not known if there is none."""
    ours: bool = False
    """Whether it is bigstep's own result: then there is no paper to compare a run with."""
    note: str = ""
    """What a reader must know before comparing."""
