"""What runs reached, as rows for any table: two seeds of one recipe, then their figures."""

import statistics
import tempfile
from pathlib import Path

import bigstep
from bigstep import recipes
from bigstep.config.text import apply_settings
from bigstep.report.gather import gather
from bigstep.report.table import as_rows

with tempfile.TemporaryDirectory() as folder:
    for seed in (0, 1):
        settings = [f"seed={seed}", "model=mlp", "lr.base=0.02", "data.holdout=0.9", "workers.count=4"]
        config = apply_settings(recipes.load("plain"), settings)
        bigstep.fit(config, out=Path(folder) / str(seed), max_steps=20, device="cpu")
    rows = as_rows(gather([Path(folder)]))  # pandas.DataFrame(rows) makes a table of them
for row in rows:
    print(f"seed {row['seed']}: {100 * row['accuracy']:.1f} % in {row['seconds']:.1f} s, {row['steps']} steps")
print(f"mean {100 * statistics.mean(row['accuracy'] for row in rows):.1f} %")
