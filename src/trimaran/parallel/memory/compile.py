"""torch.compile of each block."""

import torch._dynamo  # noqa: F401  torch imports it when the first block is compiled

from trimaran.core import Plan
from trimaran.nets import Network
from trimaran.parallel.mesh import RankMesh


def apply_compile(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Compile each block separately: equal blocks share one compilation. Parameter names do not change.

    Runs after recompute, whose policy becomes part of the graph, and before FSDP, whose hooks stay outside. Activation
    offload wraps the compiled block, in either order.
    """
    if plan.compile:
        others = network.compiled_outside_blocks if ranks.degrees.tp == 1 else ()
        for block in (*network.blocks, *others):
            block.compile()
