"""The proofs of equality: does a run on several ranks take the path of one, and if not, where do they diverge?"""

from __future__ import annotations

from bigstep.check.checking import PROPERTIES, check
from bigstep.check.engine import bigstep_loop
from bigstep.check.pool import Pool
from bigstep.check.report import Report, Row
from bigstep.check.subject import Own, Subject, Trial

__all__ = ["PROPERTIES", "Own", "Pool", "Report", "Row", "Subject", "Trial", "bigstep_loop", "check"]
