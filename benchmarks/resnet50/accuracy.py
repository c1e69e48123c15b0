"""Gradients of the fused fp16 network and of eager fp16, tensor by tensor, against float64."""

from __future__ import annotations

import copy

import torch
from torch import nn

from bigstep.gpu import GraphedStep, optimize
from bigstep.optim import LARS

BATCH, SEEDS, SCALE = 32, 3, 1024.0


def reference(model: nn.Module, images, labels, criterion) -> dict[str, torch.Tensor]:
    exact = copy.deepcopy(model).double()
    criterion(exact(images.double()), labels).backward()
    return {name: p.grad for name, p in exact.named_parameters()}


def eager(model: nn.Module, images, labels, criterion) -> dict[str, torch.Tensor]:
    plain = copy.deepcopy(model).to(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.float16):
        loss = criterion(plain(images), labels)
    (loss * SCALE).backward()
    return {name: p.grad / SCALE for name, p in plain.named_parameters()}


def fused(model: nn.Module, images, labels, criterion) -> dict[str, torch.Tensor]:
    """Through the same code that a graph records."""
    ours = copy.deepcopy(model)
    optimize(ours)
    step = GraphedStep(ours, criterion, LARS(list(ours.parameters()), lr=0.0), scale=SCALE)
    _, gradients = step._forward_backward(images.contiguous(memory_format=torch.channels_last), labels)
    names = [name for name, _ in ours.named_parameters()]
    return {name: g.float() / SCALE for name, g in zip(names, gradients, strict=True)}


def measure(result: dict) -> None:
    import torchvision

    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    errors: dict[str, dict[str, list[float]]] = {"fused": {}, "eager": {}}
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        model = torchvision.models.resnet50().cuda()
        for name, module in model.named_modules():
            if name.endswith("bn3"):
                nn.init.constant_(module.weight, 0.2)  # between zero gamma and one: a network that has begun to learn
        # Smooth images that differ from one another. White noise looks the same to every deep feature, and batch norm
        # then amplifies rounding until nothing of the gradient is left, in any fp16 network.
        coarse = torch.randn(BATCH, 3, 8, 8, device="cuda")
        images = nn.functional.interpolate(coarse, 224, mode="bicubic").half()
        labels = torch.randint(1000, (BATCH,), device="cuda")
        want = reference(model, images, labels, criterion)
        for kind, function in (("fused", fused), ("eager", eager)):
            got = function(model, images, labels, criterion)
            for name, value in want.items():
                error = float((got[name].double() - value).norm() / value.norm())
                errors[kind].setdefault(name, []).append(error)
    means = {kind: {name: sum(v) / len(v) for name, v in each.items()} for kind, each in errors.items()}

    def summary(values) -> dict[str, float]:
        ordered = torch.tensor(sorted(values))
        return {"median": float(ordered.median()), "p90": float(ordered.quantile(0.9)), "max": float(ordered[-1])}

    no_worse = sum(means["fused"][name] <= 1.05 * means["eager"][name] for name in means["fused"])
    result["accuracy"] = {
        "batch": BATCH, "seeds": SEEDS, "layers": len(means["fused"]), "no_worse": no_worse,
        "fused": summary(means["fused"].values()), "eager": summary(means["eager"].values()), "by_layer": means,
    }  # fmt: skip
    print("  ", {k: v for k, v in result["accuracy"].items() if k != "by_layer"}, flush=True)
