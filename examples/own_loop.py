"""LARS with warm-up and polynomial decay in a plain PyTorch loop: the pieces work without the bigstep program."""

import torch

from bigstep.data import open_data
from bigstep.optim import LARS, parameter_groups
from bigstep.schedules import join, polynomial, warmup

BATCH, EPOCHS, PEAK = 512, 3, 8.0

torch.manual_seed(0)
train = open_data("embedded").train
images, labels = train.images.float() / 255, train.labels
model = torch.nn.Sequential(
    torch.nn.Flatten(), torch.nn.Linear(28 * 28, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
)
rate = join((1.0, warmup(0.0, PEAK, 1.0)), (EPOCHS, polynomial(PEAK, 0.0, 1.0, EPOCHS)))
optimizer = LARS(parameter_groups(model, weight_decay=1e-4), lr=PEAK, trust_coefficient=0.01)

steps = len(images) // BATCH
for epoch in range(EPOCHS):
    order = torch.randperm(len(images))
    for step in range(steps):
        batch = order[step * BATCH : (step + 1) * BATCH]
        for group in optimizer.param_groups:
            group["lr"] = rate(epoch + step / steps)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
print(f"accuracy {100 * (model(images).argmax(1) == labels).float().mean():.1f} % on its own images")
