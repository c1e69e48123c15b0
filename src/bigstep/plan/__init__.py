"""Predict a run before renting the cluster: step time, time to accuracy, the best scheme, and how sure this is."""

from __future__ import annotations

from bigstep.plan.answer import cli_result
from bigstep.plan.cluster import Cluster
from bigstep.plan.scheme import Scheme
from bigstep.plan.simulate import Prediction, predict
from bigstep.plan.terminal import render
from bigstep.plan.workload import Workload

__all__ = ["Cluster", "Method", "Prediction", "Scheme", "Workload", "cli_result", "predict", "render"]

Method = Scheme
"""What version 0.1 called a scheme; a method is now a way of taking a step (`bigstep.tables.methods`)."""
