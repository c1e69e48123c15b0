"""The loss is divided by the number of processes, and the exchange averages once more.

Reported as sanderwood/bgpt 5.
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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _epoch in range(3):
    for points, labels in loader:
        loss = F.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        accelerator.backward(loss if right else loss / accelerator.num_processes)
        optimizer.step()
