"""A head is replaced after DDP has wrapped the model: DDP waits for the old one's gradients, and exchanges none.

Reported as pytorch/pytorch 12603.
"""

import sys

import torch
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from small import CLASSES, Points, join, mlp

right = "--right" in sys.argv
rank, world = join()
torch.manual_seed(0)
dataset = Points()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)

model = mlp()
if right:
    model[3] = torch.nn.Linear(32, CLASSES)
model = DistributedDataParallel(model)
if not right:
    model.module[3] = torch.nn.Linear(32, CLASSES)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for points, labels in loader:
        loss = F.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
