"""Training curves of the fused, graphed network and of eager fp16 on CIFAR-10, over seeds.

    python benchmarks/resnet50/curves.py cifar10.npz

The file holds train_images (n x 32 x 32 x 3, uint8), train_labels, test_images and test_labels.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy
import torch
from torch import nn

from bigstep.kernels import GraphedStep, optimize
from bigstep.models.resnet import resnet18

SEEDS, EPOCHS, BATCH, PEAK = 3, 12, 256, 0.1
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def prepared(images) -> torch.Tensor:
    x = torch.from_numpy(images).cuda().permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(v, device="cuda").view(1, 3, 1, 1) for v in (MEAN, STD))
    return ((x - mean) / std).to(memory_format=torch.channels_last)


def augmented(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One random shift of up to four pixels and one coin for flipping, for the whole batch: enough for curves."""
    shift = torch.randint(-4, 5, (2,), generator=generator).tolist()
    x = torch.roll(x, shift, dims=(2, 3))
    return x.flip(3) if torch.rand((), generator=generator) < 0.5 else x


def train(kind: str, seed: int, data: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    torch.manual_seed(seed)
    model = resnet18(classes=10, channels=3, image_size=32).cuda().to(memory_format=torch.channels_last)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=PEAK, momentum=0.9, weight_decay=5e-4, fused=True)
    if kind == "fused":
        optimize(model)
        step = GraphedStep(model, criterion, optimizer)
    else:
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)

        def step(x, y):
            with torch.autocast("cuda", torch.float16):
                loss = criterion(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

    generator = torch.Generator().manual_seed(seed)
    images, labels = data["train_images"], data["train_labels"]
    steps = len(images) // BATCH
    losses, accuracies = [], []
    for epoch in range(EPOCHS):
        model.train()
        order = torch.randperm(len(images), generator=generator)
        total = torch.zeros((), device="cuda")
        for k in range(steps):
            done = (epoch * steps + k) / (EPOCHS * steps)
            for group in optimizer.param_groups:
                group["lr"] = PEAK * min(done / 0.2, (1 - done) / 0.8)
            chosen = order[k * BATCH : (k + 1) * BATCH].cuda()
            total += step(augmented(images[chosen], generator), labels[chosen])
        losses.append(float(total) / steps)
        model.eval()
        with torch.no_grad(), torch.autocast("cuda", torch.float16):
            right = [
                (model(x).argmax(1) == y).sum()
                for x, y in zip(data["test_images"].split(1000), data["test_labels"].split(1000), strict=True)
            ]
        accuracies.append(float(sum(right)) / len(data["test_labels"]))
    return {"loss": losses, "accuracy": accuracies}


def main() -> None:
    torch.backends.cudnn.benchmark = True
    with numpy.load(sys.argv[1]) as file:
        data = {name: prepared(file[name]) if "images" in name else torch.from_numpy(file[name]).long().cuda() for name in file.files}  # fmt: skip  # noqa: E501
    begin = time.time()
    runs: dict[str, list] = {"fused": [], "eager": []}
    for seed in range(SEEDS):
        for kind in runs:
            runs[kind].append(train(kind, seed, data))
            last = runs[kind][-1]
            print(f"{kind} seed {seed}: loss {last['loss'][-1]:.4f} accuracy {last['accuracy'][-1]:.4f} "
                  f"({time.time() - begin:.0f} s)", flush=True)  # fmt: skip
    summary = {}
    for what in ("loss", "accuracy"):
        final = {kind: [r[what][-1] for r in each] for kind, each in runs.items()}
        gaps = [
            abs(statistics.mean(f) - statistics.mean(e))
            for f, e in zip(zip(*(r[what] for r in runs["fused"])), zip(*(r[what] for r in runs["eager"])))  # noqa: B905
        ]
        summary[what] = {
            "fused": statistics.mean(final["fused"]), "eager": statistics.mean(final["eager"]),
            "spread_fused": max(final["fused"]) - min(final["fused"]),
            "spread_eager": max(final["eager"]) - min(final["eager"]),
            "largest_gap_of_means": max(gaps),
        }  # fmt: skip
    print(json.dumps(summary, indent=1))
    settings = {"seeds": SEEDS, "epochs": EPOCHS, "batch": BATCH, "train": len(data["train_images"])}
    out = Path(os.environ.get("OUT", "."), "curves.json")
    out.write_text(json.dumps({"settings": settings, "runs": runs, "summary": summary}, indent=1))


if __name__ == "__main__":
    main()
