"""Ranks that begin differently: `torchrun --standalone --nproc-per-node 2 examples/course/02-ddp/solution.py`."""

import torch
import torch.distributed as dist
from lesson import STEPS, get_batch
from torch import nn
from torch.nn import functional as F


def train(*, broadcasts):
    """Return the loss of all rows after training, and how far the weights of the ranks are apart."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # the mistake
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    if broadcasts:  # the repair, which DistributedDataParallel and trimaran.prepare do at the start
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, y = (each.chunk(world_size)[rank] for each in get_batch(step))
        F.cross_entropy(model(x), y).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        optimizer.step()
        optimizer.zero_grad()
    largest, smallest = (torch.cat([each.detach().flatten() for each in model.parameters()]) for _ in range(2))
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    return (largest - smallest).max().item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    apart, together = train(broadcasts=False), train(broadcasts=True)
    if dist.get_rank() == 0:
        print(f"largest difference of a weight between ranks: {apart:.4f}; with a broadcast {together:.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
