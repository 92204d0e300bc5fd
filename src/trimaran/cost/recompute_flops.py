"""How much arithmetic recompute adds to a step: what the hardware does, and the model did not ask for."""

from functools import lru_cache

from trimaran.core import Flops, Plan
from trimaran.cost.block_time import BlockSplit, products
from trimaran.cost.job import Job
from trimaran.cost.time_profiles import TimeProfile
from trimaran.models import Opaque, OutlineLayer, Tower


def repeated_flops(job: Job, plan: Plan) -> Flops:
    """Return the operations that one step of the whole cluster does a second time in backward.

    A tower that no gradient comes to computes nothing again; nor do a head and a loss.
    """
    total = 0.0
    for tower in job.outline.towers:
        how = job.recompute_of(tower, plan)
        if how != "none" and job.outline.passes(tower) > 1:
            total += _of_tower(tower, how, job.seq_len, job.stack.time)
    return Flops(plan.global_batch * total)


@lru_cache(maxsize=4096)  # a search asks again for each plan that recomputes alike
def _of_tower(tower: Tower, how: str | int, seq_len: int, profile: TimeProfile) -> float:
    """Return what one sample costs again. A number k means every k-th block, from the first."""
    positions, length = tower.places(seq_len)
    blocks = [block for block, count in tower.runs for _ in range(count)]
    stride = int(how) if isinstance(how, int) else 1
    return sum(_of_block(block, positions, length, profile, selective=how == "selective") for block in blocks[::stride])


def _of_block(
    block: OutlineLayer | Opaque, positions: int, length: int, profile: TimeProfile, *, selective: bool
) -> float:
    whole = float(block.flops(positions, length))
    if isinstance(block, Opaque):
        return whole
    made = list(products(block, BlockSplit(positions, length, tp=1, ep=1)))
    sizes = [2.0 * each.rows * each.columns * each.depth * each.groups for each in made]
    if profile.recompute == "whole":
        return max(0.0, whole - sum(sizes)) if selective else whole  # attention, or all
    if selective:
        return sum(size for size, each in zip(sizes, made, strict=True) if not each.is_kept)
    return whole - sum(sizes[-1:])  # it stops before the last product, which is nobody's input
