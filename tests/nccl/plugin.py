"""Faults inside a rank that differ with NCCL, beside those of `tests.chaos.plugin`; imported by ranks."""

import torch
import torch.distributed as dist

from tests.chaos import plugin as chaos_plugin
from tests.fault import plugin


def _call_with_another_shape() -> None:
    """Call a collective that no other rank calls, on this rank's device: on a GPU through NCCL."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    dist.all_reduce(torch.zeros(7, device=device))


plugin.FAULTS["device-shape"] = _call_with_another_shape
RUN = chaos_plugin.RUN
