"""How many bytes, how many seconds: pure functions, one term each. Imports no torch."""

from trimaran.cost.memory import STATE_BYTES, needed_bytes
from trimaran.cost.step import predict

__all__ = ["STATE_BYTES", "needed_bytes", "predict"]
