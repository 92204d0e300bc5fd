"""Compiled blocks."""

from trimaran.core import Plan
from trimaran.nets import Network
from trimaran.parallel.mesh import RankMesh


def apply_compile(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Compile each block by itself: alike blocks share one compilation, and parameter names do not change.

    Comes after recompute, whose choice of what to keep is then part of the graph, and before FSDP, whose hooks stay out
    of it. Offload of activations is around the compiled block, whichever of the two comes first.
    """
    if plan.compile:
        fringe = network.fringe if ranks.degrees.tp == 1 else ()
        for block in (*network.blocks, *fringe):
            block.compile()
