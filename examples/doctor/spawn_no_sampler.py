"""Ranks started with spawn, and a loader that gives each of them everything.

Reported as clovaai/voxceleb_trainer 98.
"""

import os
import sys

import torch
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from small import Points, mlp

right = "--right" in sys.argv


def train(rank, world, right):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    dataset = Points()
    sampler = DistributedSampler(dataset, world, rank) if right else None
    loader = DataLoader(dataset, batch_size=8, shuffle=sampler is None, sampler=sampler)
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for points, labels in loader:
            loss = F.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, args=(2, right), nprocs=2)
