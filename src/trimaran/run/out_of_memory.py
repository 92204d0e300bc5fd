"""Recognises an out-of-memory error by its text, on the host or on the device."""

import re

OUT_OF_MEMORY = re.compile(
    r"out ?of ?memory"  # torch.OutOfMemoryError, CUDA and NCCL
    r"|can(no|')t allocate memory"  # torch's CPU allocator on x86, and the system's ENOMEM
    r"|DefaultCPUAllocator: not enough memory"  # torch's CPU allocator on aarch64
    r"|std::bad_alloc|MemoryError",
    re.IGNORECASE,
)


def says_out_of_memory(text: str) -> bool:
    """Return whether `text`, an error's type and message or the end of a log, says that memory ran out."""
    return OUT_OF_MEMORY.search(text) is not None
