"""A small GPT on a text of your own: tokens are bytes, four workers, then bits per byte and a line it writes."""

import tempfile
from pathlib import Path

import torch

import bigstep
from bigstep import recipes
from bigstep.config.text import apply_settings

TEXT = "The quick brown fox jumps over the lazy dog. How vexingly quick daft zebras jump! " * 500

with tempfile.TemporaryDirectory() as folder:
    book = Path(folder) / "book.txt"
    book.write_text(TEXT)
    settings = ["data.name=text", f"data.path={book}", "data.length=32", "workers.local_batch=8"]
    config = apply_settings(recipes.load("adamw"), settings)
    result = bigstep.fit(config, out=Path(folder) / "run", max_steps=40, device="cpu")
    model = bigstep.load(Path(folder) / "run").model.eval()

line = list(b"The quick ")
with torch.no_grad():
    for _ in range(20):
        line.append(int(model(torch.tensor([line[-32:]]))[0, -1].argmax()))
written = bytes(line).decode(errors="replace")
print(f"{result.facts['bits_per_byte']:.2f} bits per byte after {result.steps} steps: {written!r}")
