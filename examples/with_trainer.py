"""LAMB with warm-up and decay in Hugging Face's Trainer: a tiny GPT-2 with fresh weights; nothing is downloaded."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from bigstep import LAMB, parameter_groups
from bigstep.schedules import join, linear, warmup

STEPS = 30
TEXT = b"To be, or not to be, that is the question. "


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.tensor(list((TEXT * 2)[index % len(TEXT) :][:32]))
        return {"input_ids": ids, "labels": ids}


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=1, n_head=2))
optimizer = LAMB(parameter_groups(model, weight_decay=0.01), lr=1.0)
rate = join((5, warmup(0.0, 0.02, until=5)), (STEPS, linear(0.02, 0.0, begin=5, until=STEPS)))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(min(step, STEPS)))

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, max_steps=STEPS, per_device_train_batch_size=16, use_cpu=True, disable_tqdm=True,
        report_to=[], save_strategy="no", logging_steps=STEPS, max_grad_norm=0.0, seed=0,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Windows(), optimizers=(optimizer, scheduler))
    before = trainer.evaluate(Windows())["eval_loss"]
    trainer.train()
    after = trainer.evaluate(Windows())["eval_loss"]
print(f"loss {before:.2f} before, {after:.2f} after {STEPS} steps of LAMB")
