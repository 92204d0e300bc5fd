"""The FLOPs that recompute adds to a step. They count for hardware utilisation, not for MFU."""

from functools import lru_cache

from trimaran.core import Flops, Plan
from trimaran.core.plan import RECOMPUTED_BY_OPERATOR
from trimaran.cost.block_time import BlockSplit, matmuls
from trimaran.cost.job import Job
from trimaran.cost.time_profiles import TimeProfile
from trimaran.models import Opaque, OutlineLayer, Tower


def repeated_flops(job: Job, plan: Plan) -> Flops:
    """Return the FLOPs that one step of the whole cluster repeats in backward.

    A tower without gradients repeats nothing, and neither do head and loss.
    """
    total = 0.0
    for tower in job.outline.towers:
        recompute = job.recompute_of(tower, plan)
        if recompute != "none" and job.outline.passes(tower) > 1:
            total += _tower_flops(tower, recompute, job.seq_len, job.stack.time)
    return Flops(plan.global_batch * total)


@lru_cache(maxsize=4096)  # many plans of a search share one recompute mode
def _tower_flops(tower: Tower, recompute: str | int, seq_len: int, profile: TimeProfile) -> float:
    """Return the repeated FLOPs of one sample. A number k means every k-th block, from the first on."""
    positions, length = tower.sample_positions(seq_len)
    blocks = [block for block, count in tower.runs for _ in range(count)]
    stride = int(recompute) if isinstance(recompute, int) else 1
    return sum(_block_flops(block, positions, length, profile, str(recompute)) for block in blocks[::stride])


def _block_flops(
    block: OutlineLayer | Opaque, positions: int, length: int, profile: TimeProfile, recompute: str
) -> float:
    forward = float(block.flops(positions, length))
    if isinstance(block, Opaque):
        return forward
    block_matmuls = list(matmuls(block, BlockSplit(positions, length, tp=1, ep=1)))
    flops = [2.0 * each.rows * each.columns * each.depth * each.groups for each in block_matmuls]
    if profile.recompute == "complete":
        return max(0.0, forward - sum(flops)) if recompute == "selective" else forward  # attention only, or everything
    if recompute in RECOMPUTED_BY_OPERATOR:
        unsaved = [num for num, each in zip(flops, block_matmuls, strict=True) if not each.is_saved]
        return 2.0 * positions * block.adapter_parameters() + (sum(unsaved) if recompute == "selective" else 0.0)
    return forward - sum(flops[-1:])  # torch stops before the last matmul, whose output backward does not need
