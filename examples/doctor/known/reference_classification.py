"""In the shape of torchvision's reference classification: functions with args, samplers, evaluation, checkpoints."""

import argparse
import datetime
import os
import time

import torch
import torch.utils.data
from torch import nn


def train_one_epoch(model, criterion, optimizer, data_loader, epoch, args):
    model.train()
    for i, (image, target) in enumerate(data_loader):
        start_time = time.time()
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        if args.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        optimizer.step()
        if i % args.print_freq == 0:
            acc1 = (output.argmax(1) == target).float().mean()
            print(
                f"Epoch: [{epoch}] {i} loss {loss.item():.3f} acc1 {acc1.item():.2f} {time.time() - start_time:.3f} s"
            )


def evaluate(model, criterion, data_loader, args):
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    with torch.inference_mode():
        for image, target in data_loader:
            output = model(image)
            total += torch.tensor([(output.argmax(1) == target).sum().item(), len(target)], dtype=torch.float64)
    if args.distributed:
        torch.distributed.barrier()
        torch.distributed.all_reduce(total)
    print(f"Test: Acc@1 {total[0] / total[1]:.3f}")


def images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=generator)
    pictures = torch.randn(count, 3, 8, 8, generator=generator) + labels[:, None, None, None]
    return torch.utils.data.TensorDataset(pictures, labels)


def main(args):
    os.makedirs(args.output_dir, exist_ok=True)
    args.distributed = "RANK" in os.environ
    if args.distributed:
        torch.distributed.init_process_group(backend="gloo", init_method="env://")
    dataset, dataset_test = images(320, 0), images(96, 1)
    if args.distributed:
        train_sampler = torch.utils.data.distributed.DistributedSampler(dataset)
        test_sampler = torch.utils.data.distributed.DistributedSampler(dataset_test, shuffle=False)
    else:
        train_sampler = torch.utils.data.RandomSampler(dataset)
        test_sampler = torch.utils.data.SequentialSampler(dataset_test)
    data_loader = torch.utils.data.DataLoader(
        dataset, batch_size=args.batch_size, sampler=train_sampler, num_workers=args.workers, pin_memory=False
    )
    data_loader_test = torch.utils.data.DataLoader(dataset_test, batch_size=args.batch_size, sampler=test_sampler)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    if args.distributed and args.sync_bn:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    main_lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs - 1)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=1)
    lr_scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, main_lr_scheduler], milestones=[1])
    model_without_ddp = model
    if args.distributed:
        model = torch.nn.parallel.DistributedDataParallel(model)
        model_without_ddp = model.module
    start_time = time.time()
    for epoch in range(args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, data_loader, epoch, args)
        lr_scheduler.step()
        evaluate(model, criterion, data_loader_test, args)
        checkpoint = {
            "model": model_without_ddp.state_dict(),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": lr_scheduler.state_dict(),
            "epoch": epoch,
            "args": args,
        }
        if not args.distributed or torch.distributed.get_rank() == 0:
            torch.save(checkpoint, os.path.join(args.output_dir, f"model_{epoch}.pth"))
            torch.save(checkpoint, os.path.join(args.output_dir, "checkpoint.pth"))
    print(f"Training time {datetime.timedelta(seconds=int(time.time() - start_time))}")


def get_args_parser():
    parser = argparse.ArgumentParser(description="Classification Training")
    parser.add_argument("-b", "--batch-size", default=16, type=int)
    parser.add_argument("--epochs", default=5, type=int)
    parser.add_argument("-j", "--workers", default=1, type=int)
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--clip-grad-norm", default=None, type=float)
    parser.add_argument("--print-freq", default=10, type=int)
    parser.add_argument("--output-dir", default="./out", type=str)
    parser.add_argument("--sync-bn", action="store_true")
    return parser


if __name__ == "__main__":
    main(get_args_parser().parse_args())
