"""The same seed on every rank: the augmentation repeats.

Reported as facebookresearch/fastMRI 123.
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


class Jittered(Points):
    def __getitem__(self, index):
        point, label = super().__getitem__(index)
        return point + 0.1 * torch.randn_like(point), label


model = DistributedDataParallel(mlp())
if right:
    torch.manual_seed(1 + rank)
dataset = Jittered()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for points, labels in loader:
        loss = F.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
