"""Columns, then columns: `torchrun --standalone --nproc-per-node 2 examples/course/05-tensor-parallel/solution.py`.

The bytes are those that a ring makes each rank send.
"""

import torch
import torch.distributed as dist
from lesson import INNER, ROWS, WIDTH


def gather_columns(part):
    """Return the columns of all ranks beside each other, and the bytes sent."""
    ranks = dist.get_world_size()
    parts = [torch.empty_like(part) for _ in range(ranks)]
    dist.all_gather(parts, part)
    return torch.cat(parts, dim=1), (ranks - 1) * part.nbytes


def sum_of_ranks(part):
    """Return the sum of the parts of all ranks, and the bytes sent."""
    ranks = dist.get_world_size()
    dist.all_reduce(part)
    return part, 2 * (ranks - 1) * part.nbytes // ranks


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    up, down = torch.randn(WIDTH, INNER) / WIDTH**0.5, torch.randn(INNER, WIDTH) / INNER**0.5
    x = torch.randn(ROWS, WIDTH)
    expected = torch.nn.functional.gelu(x @ up) @ down
    mine = torch.nn.functional.gelu(x @ up.chunk(ranks, dim=1)[rank])

    rows, sent_by_rows = sum_of_ranks(mine @ down.chunk(ranks, dim=0)[rank])

    inner, sent_inner = gather_columns(mine)
    columns, sent_columns = gather_columns(inner @ down.chunk(ranks, dim=1)[rank])
    if rank == 0:
        equal = all(torch.allclose(each, expected, atol=1e-5) for each in (rows, columns))
        print("both equal to one process" if equal else "different")
        print(f"columns, then rows:    {sent_by_rows:,} bytes sent by a rank in forward")
        print(f"columns, then columns: {sent_inner + sent_columns:,} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
