"""A Trainer's own loader has a distributed sampler, and prepare splits it once more.

Reported as huggingface/transformers 34365.
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Trainer, TrainingArguments

from small import Named, mlp

right = "--right" in sys.argv


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = mlp()

    def forward(self, points, labels):
        logits = self.model(points)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class OwnTrainer(Trainer):
    def get_train_dataloader(self):
        if right:
            return super().get_train_dataloader()
        sampler = DistributedSampler(self.train_dataset, self.args.world_size, self.args.process_index)
        loader = DataLoader(self.train_dataset, batch_size=8, sampler=sampler, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


arguments = TrainingArguments(
    "out", per_device_train_batch_size=8, num_train_epochs=3, use_cpu=True, report_to=[], save_strategy="no"
)
torch.manual_seed(0)
OwnTrainer(Classifier(), arguments, train_dataset=Named()).train()
