"""LARS and compressed gradients inside Lightning; two processes: torchrun --nproc-per-node 2 with_lightning.py."""

import logging
import os

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from bigstep import LARS, Exchange, parameter_groups
from bigstep.schedules import join, polynomial, warmup

EPOCHS, STEPS = 4, 8


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = LARS(parameter_groups(self, weight_decay=1e-4), lr=1.0, trust_coefficient=0.02)
        rate = join((1, warmup(0.1, 1.0, until=1)), (EPOCHS, polynomial(1.0, 0.0, begin=1, until=EPOCHS)))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(min(step / STEPS, EPOCHS)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Compress(lightning.Callback):
    """Puts an exchange under the model that Lightning has wrapped."""

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        if trainer.world_size > 1:
            self.exchange = Exchange(codec="fp16").attach(trainer.strategy.model)


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
lightning.seed_everything(0, verbose=False)
inputs = torch.randn(512, 8)
labels = (inputs.sum(1) > 0).long()
ranks = int(os.environ.get("WORLD_SIZE", "1"))
trainer = lightning.Trainer(
    accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_epochs=EPOCHS, logger=False,
    callbacks=[Compress()], enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
net = Net()
trainer.fit(net, DataLoader(TensorDataset(inputs, labels), batch_size=512 // STEPS // ranks, shuffle=True))
if trainer.is_global_zero:
    print(f"accuracy {100 * (net.layers(inputs).argmax(1) == labels).float().mean():.0f} % on {ranks} rank(s)")
