"""Your own model, data and loss on eight logical workers, and the trained weights used afterwards."""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

import bigstep
from bigstep.config import LrConfig, RunConfig, WorkersConfig

torch.manual_seed(0)
inputs = torch.randn(512, 3)
data = torch.utils.data.TensorDataset(inputs, inputs @ torch.tensor([[1.0], [-2.0], [0.5]]))
config = RunConfig(workers=WorkersConfig(count=8, local_batch=8), epochs=20, lr=LrConfig(base=0.1, scaling="none"))

with tempfile.TemporaryDirectory() as folder:
    model = torch.nn.Linear(3, 1)
    result = bigstep.fit(
        config, model, (data, data), torch.nn.functional.mse_loss, out=Path(folder) / "run", device="cpu"
    )
    again = torch.nn.Linear(3, 1)
    again.load_state_dict(load_file(result.facts["model"]))
print(f"loss {result.loss:.2e}, weights {[round(weight, 2) for weight in again.weight[0].tolist()]}")
