"""Expandable segments of the CUDA allocator are switched on and off in a running process."""

import pytest
import torch

from trimaran.train import set_expandable_segments

pytestmark = pytest.mark.gpu

SIZE = 64 << 20


def new_segment_expands() -> bool:
    """Reserve memory that no free segment holds, and return whether its segment is expandable."""
    torch.cuda.empty_cache()
    tensor = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    address = tensor.data_ptr()
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            return bool(segment["is_expandable"])
    raise AssertionError("the tensor is in no segment")


def test_expandable_segments_change_while_tensors_live() -> None:
    device = torch.device("cuda")
    live = torch.full((SIZE,), 7, dtype=torch.uint8, device=device)
    at_start = new_segment_expands()
    for wanted in (True, False, True):
        set_expandable_segments(wanted, device)
        assert new_segment_expands() == wanted
        assert bool((live == 7).all()), "what is in other segments stays"
    set_expandable_segments("auto", device)
    assert new_segment_expands() == at_start
