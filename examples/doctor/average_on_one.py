"""A moving average of the weights is updated on rank 0 only, and used on all.

Reported as lucidrains/ema-pytorch 9.
"""

import copy
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
average = copy.deepcopy(model.module)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for points, labels in loader:
        loss = F.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 or right:
            with torch.no_grad():
                for kept, now in zip(average.parameters(), model.module.parameters(), strict=True):
                    kept.lerp_(now, 0.1)
dist.destroy_process_group()
