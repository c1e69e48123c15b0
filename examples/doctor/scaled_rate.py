"""The rate is scaled with the ranks though the batch was divided among them.

Reported as mala-project/mala 422.
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
loader = DataLoader(dataset, batch_size=16 // world, sampler=sampler)
rate = 0.05
model = DistributedDataParallel(mlp())
optimizer = torch.optim.SGD(model.parameters(), lr=rate if right else rate * world, momentum=0.9)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for points, labels in loader:
        loss = F.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
