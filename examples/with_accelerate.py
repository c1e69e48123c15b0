"""LARS and 1-bit gradients inside Accelerate; two processes: torchrun --nproc-per-node 2 with_accelerate.py."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from bigstep import LARS, Exchange, parameter_groups

torch.manual_seed(0)
inputs = torch.randn(512, 8)
labels = (inputs.sum(1) > 0).long()
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
optimizer = LARS(parameter_groups(model, weight_decay=1e-4), lr=0.5, trust_coefficient=0.02)

accelerator = Accelerator(cpu=True)
loader = DataLoader(TensorDataset(inputs, labels), batch_size=64 // accelerator.num_processes, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
exchange = Exchange(codec="onebit").attach(model) if accelerator.num_processes > 1 else None

for _ in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()

right = (model(inputs).argmax(1) == labels).float().mean()
sent = f"{exchange.bytes_sent / 1e3:.1f} kB sent by a rank" if exchange else "nothing to send"
accelerator.print(f"accuracy {100 * right:.0f} % on {accelerator.num_processes} rank(s), {sent}")
if exchange:
    exchange.close()
accelerator.end_training()
