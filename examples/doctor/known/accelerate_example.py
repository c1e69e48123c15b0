"""In the shape of Accelerate's complete example: prepare, accumulate, gather_for_metrics, a linear schedule."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset


def get_dataloaders(batch_size):
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(330, 12, generator=generator)
    labels = (points.sum(1) > 0).long()
    train, test = TensorDataset(points[:256], labels[:256]), TensorDataset(points[256:], labels[256:])
    return (
        DataLoader(train, shuffle=True, batch_size=batch_size, drop_last=True),
        DataLoader(test, shuffle=False, batch_size=batch_size),
    )


def training_function(config):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=config["accumulation"])
    set_seed(config["seed"])
    train_dataloader, eval_dataloader = get_dataloaders(config["batch_size"])
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = AdamW(params=model.parameters(), lr=config["lr"])
    total = len(train_dataloader) * config["num_epochs"] // config["accumulation"]
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 4) * max(0.0, (total - step) / total)
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    for epoch in range(config["num_epochs"]):
        model.train()
        for points, labels in train_dataloader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(points), labels)
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = count = 0
        for points, labels in eval_dataloader:
            with torch.no_grad():
                predictions = model(points).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, labels))
            right, count = right + int((predictions == references).sum()), count + len(references)
        accelerator.print(f"epoch {epoch}: {right / count:.3f} of {count}")


if __name__ == "__main__":
    training_function({"lr": 2e-3, "num_epochs": 4, "seed": 42, "batch_size": 8, "accumulation": 2})
