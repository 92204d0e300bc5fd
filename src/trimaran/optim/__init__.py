"""AdamW for the parameters of this rank, with optimizer states in fp32, bf16 or 8 bits, on the device or the host."""

from trimaran.optim.build_optimizer import LR_FACTOR, build_optimizer, decay_groups

__all__ = ["LR_FACTOR", "build_optimizer", "decay_groups"]
