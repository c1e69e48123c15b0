"""A DataLoader without a distributed sampler: every rank sees everything.

Reported as PatrickHua/SimSiam 16.
"""

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
sampler = DistributedSampler(dataset) if right else None
loader = DataLoader(dataset, batch_size=8, shuffle=sampler is None, sampler=sampler)
model = DistributedDataParallel(mlp())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(3):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for points, labels in loader:
        loss = F.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
dist.destroy_process_group()
