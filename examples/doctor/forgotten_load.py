"""The optimizer's state is saved, and forgotten when the checkpoint is loaded.

Reported as NVIDIA-NeMo/Automodel 763.
"""

import os
import sys

import torch
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from small import Points, join, mlp

right = "--right" in sys.argv
rank, world = join()
torch.manual_seed(0)
dataset = Points()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DistributedDataParallel(mlp())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
start = 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt")
    model.module.load_state_dict(state["model"])
    if right:
        optimizer.load_state_dict(state["optimizer"])
    start = state["epoch"] + 1
for epoch in range(start, 4):
    sampler.set_epoch(epoch)
    for points, labels in loader:
        loss = F.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        torch.save({"epoch": epoch, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
dist.destroy_process_group()
