"""DistributedSampler pads the evaluation, and some samples are counted twice.

Reported as pytorch/pytorch 25162.
"""

import sys

import torch
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from small import Points, join, mlp

right = "--right" in sys.argv
rank, world = join()
torch.manual_seed(0)
dataset = Points()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)

test = Points(67, offset=1)
if right:
    judge = DataLoader(Subset(test, range(rank, len(test), world)), batch_size=8)
else:
    judge = DataLoader(test, batch_size=8, sampler=DistributedSampler(test, shuffle=False))
model = DistributedDataParallel(mlp())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(3):
    sampler.set_epoch(epoch)
    model.train()
    for points, labels in loader:
        loss = F.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    hits = torch.zeros(2)
    with torch.no_grad():
        for points, labels in judge:
            hits += torch.tensor([(model.module(points).argmax(1) == labels).sum(), len(labels)])
    dist.all_reduce(hits)
    print(epoch, hits[0] / hits[1])
dist.destroy_process_group()
