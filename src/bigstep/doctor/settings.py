"""What the examination tells the observers in each process, carried in one environment variable."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

__all__ = ["VARIABLE", "Settings"]

VARIABLE = "BIGSTEP_DOCTOR"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of the program under observation."""

    facts: str
    """The folder that takes the facts."""
    root: str
    """The scratch copy of the user's working directory, in which the program runs."""
    original: str
    """The directory that it is a copy of."""
    own: str
    """The folder of the script: code below it, or below the root, is the user's own."""
    steps: int
    """Updates after which the program is stopped."""
    ranks: int
    starts_itself: bool = False
    """The program starts its ranks itself, so the examination starts it only once."""
    port: int = 0
    """Where the ranks meet; it replaces a port that the script sets, which may be taken."""
    detail: int = 5
    """Updates that are looked at in detail; the later ones are only timed."""
    only_time: bool = False
    began: float = 0.0
    """When the examination began: a file that is older is the user's, and stays as it is."""
    short: int = 0
    """Batches after which a pass over the data is cut off, to see several passes; 0 leaves passes whole."""

    def to_environment(self) -> dict[str, str]:
        """Return the variable that carries the settings."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Settings:
        """Read the variable."""
        return cls(**json.loads(os.environ[VARIABLE]))
