"""How many blocks share an FSDP unit. The trainer joins them, and the cost model counts them."""

from trimaran.core.plan import Plan

MEBIBYTE = 1 << 20
GRADIENT_BYTES = 4  # per parameter: FSDP reduces gradients in fp32


def num_units(plan: Plan, block_parameters: float, num_blocks: int) -> int:
    """Return how many units so many equal decoder layers are.

    A unit costs host time in every micro-batch, and the latency of its collectives. So small blocks are joined, to
    units whose gradients are about as large as a bucket of DDP (`plan.comm.bucket_mb`). Not in a pipeline, whose stages
    are cut elsewhere, with experts that have units of their own, or with anything offloaded.
    """
    block_bytes, min_bytes = GRADIENT_BYTES * block_parameters, MEBIBYTE * plan.comm.bucket_mb
    if (
        block_bytes >= min_bytes
        or plan.sharding == "none"
        or not plan.engine_traits.uses_fsdp
        or plan.offload != "none"
    ):
        return num_blocks
    if plan.mesh.pp * plan.mesh.ep > 1:
        return num_blocks
    return max(1, round(num_blocks * block_bytes / min_bytes))


def unit_sizes(plan: Plan, block_parameters: float, num_blocks: int) -> list[int]:
    """Return the number of blocks of each unit, in order; they differ by one at most."""
    count = num_units(plan, block_parameters, num_blocks)
    size, left = divmod(num_blocks, count)
    return [size + (index < left) for index in range(count)]
