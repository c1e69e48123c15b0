"""Ranks started with spawn that join, and never exchange a gradient.

Reported as kohya-ss/sd-scripts 989.
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
WORLD = 2


def train(rank):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.setdefault("MASTER_PORT", "29512")
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    sampler = DistributedSampler(Points())
    loader = DataLoader(Points(), batch_size=8, sampler=sampler)
    model = DistributedDataParallel(mlp()) if right else mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for points, labels in loader:
            loss = F.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, nprocs=WORLD)
