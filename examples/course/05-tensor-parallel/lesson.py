"""A split MLP: `torchrun --standalone --nproc-per-node 2 examples/course/05-tensor-parallel/lesson.py`."""

import torch
import torch.distributed as dist
from torch import nn

ROWS, WIDTH, INNER = 8, 32, 128


class CopyToRanks(torch.autograd.Function):
    """Forward: nothing, every rank has the input. Backward: sum the gradients that the ranks' columns gave."""

    @staticmethod
    def forward(context, x):
        return x

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class SumOfRanks(torch.autograd.Function):
    """Forward: sum the partial outputs of the ranks. Backward: nothing, every rank has the gradient of the sum."""

    @staticmethod
    def forward(context, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(context, gradient):
        return gradient


def split_mlp(x, up, down):
    """Return down(gelu(up(x))), where this rank has some columns of `up` and the same rows of `down`."""
    inner = torch.nn.functional.gelu(CopyToRanks.apply(x) @ up)  # some columns: gelu needs no others
    return SumOfRanks.apply(inner @ down)  # every rank has a part of each sum


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    up, down = torch.randn(WIDTH, INNER) / WIDTH**0.5, torch.randn(INNER, WIDTH) / INNER**0.5
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    whole = [nn.Parameter(up), nn.Parameter(down)]
    expected = torch.nn.functional.gelu(x @ whole[0]) @ whole[1]
    expected.square().sum().backward()
    wanted, x.grad = x.grad, None

    parts = [nn.Parameter(up.chunk(ranks, dim=1)[rank].clone()), nn.Parameter(down.chunk(ranks, dim=0)[rank].clone())]
    y = split_mlp(x, *parts)
    y.square().sum().backward()
    same = [
        torch.allclose(y, expected, atol=1e-5),
        torch.allclose(x.grad, wanted, atol=1e-4),
        torch.allclose(parts[0].grad, whole[0].grad.chunk(ranks, dim=1)[rank], atol=1e-4),
        torch.allclose(parts[1].grad, whole[1].grad.chunk(ranks, dim=0)[rank], atol=1e-4),
    ]
    if rank == 0:
        sizes = [sum(each.numel() for each in weights) for weights in (whole, parts)]
        print(f"weights: {sizes[0]:,} in one process, {sizes[1]:,} on each of {ranks} ranks")
        for name, each in zip(("output", "gradient of x", "gradient of up", "gradient of down"), same, strict=True):
            print(f"{name:<17} {'equal' if each else 'different'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
