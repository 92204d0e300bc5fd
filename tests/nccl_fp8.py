"""`python -m tests.nccl_fp8`: weights that ranks of one GPU gather in fp8 over NCCL give the step of a cast after it.

Prints the cases that were equal, bit for bit. A process of its own, because it forks ranks that use the GPU.
"""

import os

import torch

from tests.dist.test_fp8_gather import two_steps
from tests.ranks import run_ranks
from trimaran.launch import SHARE_GPUS, shared_gpu_environment

CASES = [("tensor", {"dp_shard": 2}), ("block", {"dp_shard": 2}), ("block", {"dp_replicate": 2, "dp_shard": 2})]


def steps_on_gpu(recipe: str, degrees: dict[str, int], all_gather: bool) -> object:
    os.environ.update({SHARE_GPUS: "1"} | shared_gpu_environment({SHARE_GPUS: "1"}, int(os.environ["RANK"])))
    return two_steps(recipe, all_gather, degrees, "cuda")


def main() -> None:
    for recipe, degrees in CASES:
        world_size = 2 * degrees.get("dp_replicate", 1)
        ours, theirs = (
            run_ranks(world_size, steps_on_gpu, recipe, degrees, all_gather) for all_gather in (True, False)
        )
        for (found, count, _), (expected, none, _) in zip(ours, theirs, strict=True):
            assert (count, none) == (7, 0)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (recipe, degrees)
        print(recipe, degrees, "equal", flush=True)


if __name__ == "__main__":
    main()
