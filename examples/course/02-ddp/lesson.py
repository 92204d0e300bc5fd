"""Data parallelism three ways: `torchrun --standalone --nproc-per-node 2 examples/course/02-ddp/lesson.py`.

Without torchrun it trains in one process, which is what all of them have to equal.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import trimaran

STEPS, ROWS = 6, 32


def build():
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def get_batch(step):
    """Return the global batch of a step, the same on every rank."""
    random = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 16, generator=random)
    return x, x[:, :4].argmax(dim=1)


def by_hand(rank, world_size):
    """Train on a part of each batch, and average the gradients of all ranks before the step."""
    model, optimizer = build()
    for step in range(STEPS):
        x, y = (each.chunk(world_size)[rank] for each in get_batch(step))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if world_size > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
        optimizer.step()
        optimizer.zero_grad()
        yield mean_of_ranks(loss, world_size)


def with_ddp(rank, world_size):
    """Let torch average the gradients, in buckets, while backward runs."""
    model, optimizer = build()
    model = DistributedDataParallel(model)
    for step in range(STEPS):
        x, y = (each.chunk(world_size)[rank] for each in get_batch(step))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield mean_of_ranks(loss, world_size)


def with_trimaran(rank, world_size):
    """Hand over model and optimizer; `local_rows` and `step` know about the ranks."""
    model, optimizer = build()
    loop = trimaran.prepare(model, optimizer)
    for step in range(STEPS):
        x, y = loop.local_rows(get_batch(step))
        loop.backward(F.cross_entropy(model(x), y), num_samples=len(y), reduction="mean")
        yield loop.step().loss.item()


def mean_of_ranks(loss, world_size):
    loss = loss.detach().clone()
    if world_size > 1:
        dist.all_reduce(loss)
    return loss.item() / world_size


def main():
    torch.set_num_threads(1)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    ways = [by_hand]
    if world_size > 1:
        dist.init_process_group("gloo")
        ways += [with_ddp, with_trimaran]
    losses = [list(way(rank, world_size)) for way in ways]
    if rank == 0:
        print(f"{world_size} ranks  " + "  ".join(f"{way.__name__:>13}" for way in ways))
        for step in range(STEPS):
            print(f"step {step}   " + "  ".join(f"{each[step]:13.6f}" for each in losses))
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
