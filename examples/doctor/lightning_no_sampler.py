"""The sampler is switched off, and none is given.

Reported as Lightning-AI/pytorch-lightning 7813.
"""

import sys

import lightning
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from small import Points, mlp

right = "--right" in sys.argv


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = mlp()

    def training_step(self, batch, index):
        points, labels = batch
        return F.cross_entropy(self.model(points), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


lightning.seed_everything(0)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=3,
    use_distributed_sampler=right,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Classifier(), DataLoader(Points(), batch_size=8, shuffle=True))
