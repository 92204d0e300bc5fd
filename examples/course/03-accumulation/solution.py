"""Uneven tokens over DDP: `torchrun --standalone --nproc-per-node 2 examples/course/03-accumulation/solution.py`."""

import torch
import torch.distributed as dist
from lesson import build, get_batch, gradient_of, loss_of
from torch.nn.parallel import DistributedDataParallel


def gradient(rows, weight):
    """Return the gradient that DDP leaves on every rank: the average of those of the ranks."""
    model, _ = build()
    wrapped = DistributedDataParallel(model)
    (loss_of(wrapped, rows, "mean") * weight).backward()
    return gradient_of(model)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batch = get_batch(0)
    rows = [each.chunk(ranks)[rank] for each in batch]
    model, _ = build()
    loss_of(model, batch, "mean").backward()
    right = gradient_of(model)
    mine = (rows[1] != -100).sum()
    everyone = mine.clone()
    dist.all_reduce(everyone)
    usual, repaired = gradient(rows, 1.0), gradient(rows, ranks * mine / everyone)
    if rank == 0:
        print(f"error of the gradient with DDP       {(usual - right).norm() / right.norm():.1%}")
        print(f"weighted by ranks x mine / everyone  {(repaired - right).norm() / right.norm():.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
