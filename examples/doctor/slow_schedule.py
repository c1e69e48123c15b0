"""The schedule counts the steps of one rank, and never comes to its end on several.

Reported as Lightning-AI/pytorch-lightning 2149.
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
dataset = Points()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)

epochs = 6
model = DistributedDataParallel(mlp())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
steps = epochs * (len(loader) if right else len(dataset) // 8)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
for epoch in range(epochs):
    sampler.set_epoch(epoch)
    for points, labels in loader:
        loss = F.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
dist.destroy_process_group()
