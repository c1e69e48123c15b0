"""A BERT of the transformers library, whose samples are several tensors (tokens and their mask), on four workers.

The same path on any number of ranks, dropout included: torchrun --nproc-per-node 2 examples/with_transformers.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

from bigstep import RunConfig, fit
from bigstep.config import DataConfig, LrConfig, OptimizerConfig, WorkersConfig

WORDS, LENGTH = 50, 12


class Sentences(Dataset):
    """Sentences of 4 to 12 words; the class is 1 if most of them are in the upper half of the vocabulary."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(5, WORDS, (count, LENGTH), generator=generator)
        self.lengths = torch.randint(4, LENGTH + 1, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], int]:
        length = int(self.lengths[index])
        mask = (torch.arange(LENGTH) < length).long()
        words = self.words[index] * mask
        return {"input_ids": words, "attention_mask": mask}, int((words > WORDS // 2).sum() * 2 > length)


class Classifier(nn.Module):
    """Passes the parts of a sample to the library's model by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        self.bert = BertForSequenceClassification(BertConfig(vocab_size=WORDS, **sizes))

    def forward(self, parts: dict[str, Tensor]) -> Tensor:
        return self.bert(**parts).logits


config = RunConfig(
    workers=WorkersConfig(count=4, local_batch=16), epochs=2, data=DataConfig(loaders=0),
    optimizer=OptimizerConfig(name="adamw"), lr=LrConfig(base=2e-3, scaling="none"),
)  # fmt: skip
result = fit(config, Classifier(), (Sentences(2000, seed=0), Sentences(400, seed=1)), device="cpu")
print(f"{100 * result.accuracy:.1f} % of new sentences after {result.steps} steps of AdamW")
