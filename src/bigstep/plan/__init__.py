"""Predict a run before renting the cluster: step time, time to accuracy, which method, and how sure."""

from __future__ import annotations

from bigstep.plan.answer import cli_result
from bigstep.plan.cluster import Cluster
from bigstep.plan.method import Method
from bigstep.plan.simulate import Prediction, predict
from bigstep.plan.terminal import render
from bigstep.plan.workload import Workload

__all__ = ["Cluster", "Method", "Prediction", "Workload", "cli_result", "predict", "render"]
