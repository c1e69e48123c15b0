"""Training and validation are split with another seed on each rank.

Reported as Lightning-AI/pytorch-lightning 7728.
"""

import sys

import torch
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, random_split

from small import Points, join, mlp

right = "--right" in sys.argv
rank, world = join()
torch.manual_seed(0)
generator = torch.Generator().manual_seed(0 if right else rank)
train, validation = random_split(Points(), [108, 36], generator=generator)
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=8, sampler=sampler)
judge = DataLoader(validation, batch_size=16)
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
            hits += torch.tensor([(model(points).argmax(1) == labels).sum(), len(labels)])
    dist.all_reduce(hits)
    print(epoch, hits[0] / hits[1])
dist.destroy_process_group()
