"""An iterable data set that is not split over the loader's processes.

Reported as huggingface/datasets 3423.
"""

import sys

import torch
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from small import Points, join, mlp

right = "--right" in sys.argv
rank, world = join()
torch.manual_seed(0)


class Stream(IterableDataset):
    def __init__(self):
        self.points = Points()

    def __iter__(self):
        info = get_worker_info()
        first, step = (rank + world * info.id, world * info.num_workers) if right else (rank, world)
        for index in range(first, len(self.points), step):
            yield self.points[index]


loader = DataLoader(Stream(), batch_size=8, num_workers=2)
model = DistributedDataParallel(mlp())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for _epoch in range(3):
    for points, labels in loader:
        loss = F.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
