"""A language model averages losses over unequal numbers of tokens.

Reported as huggingface/transformers 24725.
"""

import sys

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from small import Sentences, join

right = "--right" in sys.argv
rank, world = join()
torch.manual_seed(0)
dataset = Sentences()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for tokens, targets in loader:
        logits = model(tokens).flatten(0, 1)
        if right:
            count = (targets != -100).sum()
            dist.all_reduce(count)
            loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") * world / count
        else:
            loss = F.cross_entropy(logits, targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
