"""Every rank keeps batch-norm statistics of its own.

Reported as open-mmlab/mmdetection 2539.
"""

import sys

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from small import CLASSES, WIDTH, Points, join

right = "--right" in sys.argv
rank, world = join()
torch.manual_seed(0)
dataset = Points()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)

judge = DataLoader(Points(64, offset=1), batch_size=16)
model = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES))
model = DistributedDataParallel(model, broadcast_buffers=right)
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
            hits += torch.tensor([(model(points).argmax(1) == labels).sum(), len(labels)])
    dist.all_reduce(hits)
    print(epoch, hits[0] / hits[1])
dist.destroy_process_group()
