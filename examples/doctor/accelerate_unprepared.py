"""The loader is not passed through accelerator.prepare.

Reported as SalesforceAIResearch/DiffusionDPO 15.
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
loader = DataLoader(Points(), batch_size=8, shuffle=True)
model = mlp()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
if right:
    loader = accelerator.prepare(loader)
for _epoch in range(3):
    for points, labels in loader:
        loss = F.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
