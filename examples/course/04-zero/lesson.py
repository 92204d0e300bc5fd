"""What a rank holds under ZeRO: `torchrun --standalone --nproc-per-node 2 examples/course/04-zero/lesson.py`.

Names of stages after it measure only those: none, optimizer, gradients, parameters.
A step has two micro-batches. The storages of all live tensors are counted four times in it.
"""

import gc
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import trimaran

LAYERS, WIDTH = 6, 192
STAGES = {"none": 0, "optimizer": 1, "gradients": 2, "parameters": 3}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def live_bytes():
    """Return the bytes that tensors of this process use: the fewest of three counts.

    gloo's threads may hold the last message for a moment.
    """
    dist.barrier()
    counts = []
    for _ in range(3):
        time.sleep(0.03)
        counts.append(count_bytes())
    return min(counts)


def count_bytes():
    """Return the bytes of all storages, each counted once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, nn.Parameter, DTensor):
            for tensor in (each, each.grad if each.is_leaf else None):
                if tensor is not None:
                    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def measure(sharding):
    """Return the bytes per parameter in a step of two micro-batches: see `predict`."""
    before = live_bytes()
    torch.manual_seed(0)
    model = Network()
    num_parameters = sum(each.numel() for each in model.parameters())
    loop = trimaran.prepare(model, torch.optim.AdamW(model.parameters()), sharding=sharding)
    for step in range(2):  # states of the optimizer exist after the first step
        found = []
        for rows in loop.micro_batches(torch.ones(2 * loop.world_size, WIDTH), size=1):
            loss = model(rows).square().sum()
            found.append(live_bytes() if step == 1 else 0)
            loop.backward(loss, num_samples=len(rows))
            del loss
            found.append(live_bytes() if step == 1 else 0)
        loop.step()
    after = live_bytes()
    return [(each - before) / num_parameters for each in (found[0], found[1], found[3], after)]


def predict(stage, ranks):
    """Return the bytes per parameter after the first forward, the first and the last backward, and the step, in fp32.

    Gathered weights are held from forward to the last backward, in stage 3 only while their block runs.
    """
    weights, gradients, states = 4.0, 4.0, 8.0
    if stage == 0:  # the buckets of gradients stay allocated, and hold those of all micro-batches
        return [weights + gradients + states] * 4
    kept = (weights + states) / ranks
    gathered = 0.0 if stage == 3 else weights
    summed = gradients if stage == 1 else gradients / ranks  # before the last micro-batch
    return [kept + gathered, kept + gathered + summed, kept + gradients / ranks, kept]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(f"bytes a parameter on rank 0 of {ranks}, measured (predicted)")
        print("                forward       1st backward  last backward between steps")
    for sharding in sys.argv[1:] or STAGES:
        stage = STAGES[sharding]
        pairs = zip(measure(sharding), predict(stage, ranks), strict=True)
        if rank == 0:
            print(f"{stage} {sharding:<12}  " + " ".join(f"{mine:6.2f} ({theirs:4.1f})" for mine, theirs in pairs))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
