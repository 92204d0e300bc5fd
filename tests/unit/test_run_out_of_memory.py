import pytest
import torch

from trimaran.launch import read_exit
from trimaran.runs import memory_holes, says_out_of_memory
from trimaran.train import is_out_of_memory

MESSAGES = {
    "cpu-x86": "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4503599627370496 bytes. Error code 12 (Cannot allocate memory)",
    "cpu-aarch64": "[enforce fail at alloc_cpu.cpp:113] data. DefaultCPUAllocator: not enough memory: "
    "you tried to allocate 4503599627370496 bytes.",
    "cuda": "CUDA out of memory. Tried to allocate 7.00 GiB. GPU 0 has a total capacity of 79.11 GiB",
    "system": "[Errno 12] Cannot allocate memory",
    "c++": "terminate called after throwing an instance of 'std::bad_alloc'",
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
def test_every_wording_of_out_of_memory_is_recognised(message: str) -> None:
    assert says_out_of_memory(message)
    assert is_out_of_memory(RuntimeError(message))
    assert read_exit(1, {"type": "RuntimeError", "message": message}, "").cause == "oom"
    assert read_exit(1, None, f"Traceback\nRuntimeError: {message}\n").cause == "oom"


def test_an_error_about_something_else_is_not_out_of_memory() -> None:
    assert not says_out_of_memory("RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 4x8)")
    assert not is_out_of_memory(ValueError("not enough values to unpack"))


def test_a_failed_allocation_of_torch_on_this_machine_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)  # 4 PiB: more than any machine can map
    assert is_out_of_memory(caught.value)
    assert read_exit(1, {"type": type(caught.value).__name__, "message": str(caught.value)}, "").cause == "oom"


def test_holes_in_fragmented_memory_are_read_from_torchs_message() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 512.00 MiB "
        "is free. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 812.25 MiB is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=..."
    )
    found = {"wanted_bytes": 3 << 29, "hole_bytes": int(812.25 * (1 << 20))}
    assert memory_holes(text) == found
    assert found.items() <= dict(read_exit(1, {"type": "OutOfMemoryError", "message": text}, "").facts).items()
    assert all(memory_holes(each) == {} for each in MESSAGES.values())
