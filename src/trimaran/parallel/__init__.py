"""Applies a Plan to an nn.Module: parallel axes, memory, precision and communication."""

from trimaran.parallel.apply import apply_plan, gradient_sync
from trimaran.parallel.gradient_norm import gradient_norm
from trimaran.parallel.mesh import RankMesh, build_mesh
from trimaran.parallel.precision import autocast, override_precision
from trimaran.parallel.vocab_parallel_loss import vocab_parallel_cross_entropy

__all__ = [
    "RankMesh",
    "apply_plan",
    "autocast",
    "build_mesh",
    "gradient_norm",
    "gradient_sync",
    "override_precision",
    "vocab_parallel_cross_entropy",
]
