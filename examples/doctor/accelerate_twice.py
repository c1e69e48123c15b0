"""accumulate divides the loss, and the script divides it as well.

Reported as huggingface/accelerate 3533.
"""

import sys

import torch
from accelerate import Accelerator
from torch.nn import functional as F
from torch.utils.data import DataLoader

from small import Points, mlp

right = "--right" in sys.argv
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
torch.manual_seed(0)
loader = DataLoader(Points(), batch_size=4, shuffle=True)
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _epoch in range(3):
    for points, labels in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(points), labels)
            accelerator.backward(loss if right else loss / 4)
            optimizer.step()
            optimizer.zero_grad()
