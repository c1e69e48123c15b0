"""Compressed gradients under your own DistributedDataParallel: one line beside it."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from bigstep import Exchange


def train(rank: int, ranks: int, store: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    )
    exchange = Exchange(codec="onebit").attach(model)  # 1 bit per value, with error feedback
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)  # each rank has its own samples
    inputs = torch.randn(256, 64)
    target = inputs[:, :1] * 2
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), target)
        loss.backward()
        optimizer.step()
    if rank == 0:
        dense = 30 * sum(parameter.numel() for parameter in model.parameters()) * 4
        print(f"loss {loss.item():.3f}: sent {exchange.bytes_sent / 1e3:.0f} kB, in float32 {dense / 1e3:.0f} kB")
    exchange.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, args=(2, f"{folder}/store"), nprocs=2, start_method="spawn")
