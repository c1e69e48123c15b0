"""Micro-batches are added up, and the loss is not divided by their number.

Reported as hirofumi0810/neural_sp 168.
"""

import sys
from contextlib import nullcontext

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

parts = 4
model = DistributedDataParallel(mlp())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(5):
    sampler.set_epoch(epoch)
    for number, (points, labels) in enumerate(loader, 1):
        last = number % parts == 0
        with nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(points), labels)
            (loss / parts if right else loss).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
