"""A NumPy generator made in the data set is copied into every loader process.

Reported as wolny/pytorch-3dunet 32.
"""

import sys

import numpy
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
    def __init__(self):
        super().__init__()
        self.generator = numpy.random.default_rng(rank)

    def __getitem__(self, index):
        point, label = super().__getitem__(index)
        noise = numpy.random.normal(size=point.shape) if right else self.generator.normal(size=point.shape)
        return point + 0.1 * torch.as_tensor(noise, dtype=torch.float32), label


dataset = Jittered()
torch.manual_seed(rank)  # the loader's processes are seeded from this
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2)
model = DistributedDataParallel(mlp())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for points, labels in loader:
        loss = F.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
