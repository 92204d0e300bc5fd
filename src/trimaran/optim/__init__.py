"""AdamW over the parameters that a plan left on this rank, its states whole, small or on the host."""

from trimaran.optim.build_optimizer import LR_FACTOR, build_optimizer, decay_groups

__all__ = ["LR_FACTOR", "build_optimizer", "decay_groups"]
