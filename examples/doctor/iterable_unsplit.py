"""An iterable data set that is not split over ranks.

Reported as huggingface/datasets 5360.
"""

import sys

import torch
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from small import Points, join, mlp

right = "--right" in sys.argv
rank, world = join()
torch.manual_seed(0)


class Stream(IterableDataset):
    def __init__(self):
        self.points = Points()

    def __iter__(self):
        for index in range(rank, len(self.points), world) if right else range(len(self.points)):
            yield self.points[index]


loader = DataLoader(Stream(), batch_size=8)
model = DistributedDataParallel(mlp())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for _epoch in range(3):
    for points, labels in loader:
        loss = F.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
