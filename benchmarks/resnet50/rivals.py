"""One training step of ResNet-50, as bigstep and its rivals take it: each a function of images and labels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bigstep.gpu import GraphedStep, optimize
from bigstep.optim import LARS, parameter_groups

Step = Callable[[Tensor, Tensor], Tensor]


def network(source: str) -> nn.Module:
    """ResNet-50 of torchvision, timm or bigstep on the GPU, the last gamma of each block zero."""
    torch.manual_seed(0)
    if source == "timm":
        import timm

        return timm.create_model("resnet50", zero_init_last=True).cuda()
    if source == "torchvision":
        import torchvision

        return torchvision.models.resnet50(zero_init_residual=True).cuda()
    from bigstep.models.resnet import resnet50

    model = resnet50(classes=1000, channels=3, image_size=224).cuda()
    for name, module in model.named_modules():
        if name.endswith("bn3"):
            nn.init.zeros_(module.weight)
    return model


def usual(source: str, compile_mode: str | None) -> Step:
    """What a user would pick: fp16 autocast, channels_last, fused SGD, GradScaler, with or without torch.compile."""
    model = network(source).to(memory_format=torch.channels_last).train()
    run = model
    if compile_mode is not None:
        run = torch.compile(model, dynamic=False, **({} if compile_mode == "default" else {"mode": compile_mode}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-5, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.float16):
            loss = criterion(run(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach().clone()

    return step


def ours(source: str = "torchvision", groups: int = 1, precision: str = "fp16") -> GraphedStep:
    """The same network through `optimize` and `GraphedStep`, with LARS."""
    model = network(source).train()
    report = optimize(model, groups=groups)
    assert not report.left, report
    optimizer = LARS(parameter_groups(model, 5e-5), lr=0.1, momentum=0.9)
    return GraphedStep(model, nn.CrossEntropyLoss(label_smoothing=0.1), optimizer, precision=precision)


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    """Random images and labels on the device."""
    images = torch.randn(size, 3, 224, 224, device="cuda", dtype=torch.float16)
    return images.to(memory_format=torch.channels_last), torch.randint(1000, (size,), device="cuda")
