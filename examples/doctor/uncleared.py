"""Nothing clears the gradients, so each update uses the sum of all before it.

Reported as wenet-e2e/wekws 72.
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
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)

model = DistributedDataParallel(mlp())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(5):
    sampler.set_epoch(epoch)
    for points, labels in loader:
        if right:
            optimizer.zero_grad()
        F.cross_entropy(model(points), labels).backward()
        optimizer.step()
dist.destroy_process_group()
