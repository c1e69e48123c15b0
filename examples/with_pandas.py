"""What runs reached as a pandas table: two rates, two seeds each, then the mean and spread of every rate."""

import tempfile
from pathlib import Path

import pandas

import bigstep
from bigstep import recipes
from bigstep.config.text import apply_settings
from bigstep.records import read_run
from bigstep.report.gather import gather
from bigstep.report.table import as_rows

with tempfile.TemporaryDirectory() as folder:
    for rate in (0.01, 0.1):
        for seed in (0, 1):
            settings = [f"seed={seed}", f"lr.base={rate}", "model=mlp", "data.holdout=0.9", "workers.count=4"]
            config = apply_settings(recipes.load("plain"), settings)
            bigstep.fit(config, out=Path(folder) / f"{rate}-{seed}", max_steps=10, device="cpu")
    runs = pandas.DataFrame(as_rows(gather([Path(folder)])))  # one row per run
    steps = pandas.DataFrame(read_run(Path(folder) / "0.1-0").train)  # one row per step of one of them

table = runs.groupby("group")["accuracy"].agg(["count", "mean", "min", "max"])
print(table.to_string(float_format="{:.3f}".format))
print(f"first loss {steps.loss.iloc[0]:.2f}, last {steps.loss.iloc[-1]:.2f} over {len(steps)} steps")
