"""Samples are read in the training process.

Reported as fengzhang427/LRD 6.
"""

import sys
import time

import torch
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from small import Points, join, mlp

right = "--right" in sys.argv
rank, world = join()
torch.manual_seed(0)


class Decoded(Points):
    def __getitem__(self, index):
        time.sleep(0.002)  # as long as a JPEG takes
        return super().__getitem__(index)


dataset = Decoded(512)
sampler = DistributedSampler(dataset)
if right:
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2, prefetch_factor=8)
else:
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DistributedDataParallel(mlp(width=1024))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for points, labels in loader:
        loss = F.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.012)  # the device is at work
dist.destroy_process_group()
