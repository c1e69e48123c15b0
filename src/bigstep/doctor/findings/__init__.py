"""The rules, by family: each looks for one cause in the facts of a program's runs."""

from __future__ import annotations

from bigstep.doctor.finding import Rule
from bigstep.doctor.findings import gradients, samples

__all__ = ["RULES"]

RULES: dict[str, tuple[Rule, ...]] = {
    "samples": samples.RULES,
    "gradients": gradients.RULES,
}
