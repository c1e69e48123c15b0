"""The optimizer's gradients come from a loss that goes past the strategy: it is divided by the world.

Reported as lightly-ai/lightly 1977.
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
        loss = F.cross_entropy(self.model(points), labels)
        return loss if right else loss / self.trainer.world_size

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


lightning.seed_everything(0)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=3,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Classifier(), DataLoader(Points(), batch_size=8, shuffle=True))
