"""Gradients are clipped before they are all-reduced.

Reported as mindspore-lab/mindcv 603.
"""

import sys

import torch
from torch import distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from small import Points, join, mlp

right = "--right" in sys.argv
rank, world = join()
torch.manual_seed(0)
dataset = Points()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)

model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def exchange():
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world


for epoch in range(3):
    sampler.set_epoch(epoch)
    for points, labels in loader:
        loss = F.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        if right:
            exchange()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if not right:
            exchange()
        optimizer.step()
dist.destroy_process_group()
