"""The schedule is counted after prepare, and a prepared scheduler steps once for each process.

Reported as huggingface/diffusers 3954.
"""

import sys

import torch
from accelerate import Accelerator
from torch.nn import functional as F
from torch.utils.data import DataLoader

from small import Points, mlp

right = "--right" in sys.argv
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
epochs = 4
loader = DataLoader(Points(), batch_size=8, shuffle=True)
model = mlp()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
whole = len(loader)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = epochs * (whole if right else len(loader))
scheduler = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps)))
for _epoch in range(epochs):
    for points, labels in loader:
        loss = F.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
