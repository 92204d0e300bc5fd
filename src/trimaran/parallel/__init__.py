"""A Plan applied to an nn.Module: axes, memory and precision."""

from trimaran.parallel.apply import apply_plan, gradient_sync
from trimaran.parallel.memory.precision import autocast
from trimaran.parallel.mesh import build_mesh

__all__ = ["apply_plan", "autocast", "build_mesh", "gradient_sync"]
