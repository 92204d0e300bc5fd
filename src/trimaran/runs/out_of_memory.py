"""Recognises an out-of-memory error by its text, on the host or on the device."""

import re

HOST_RAN_OUT = "the host ran out of memory"  # in what is said about a rank that the kernel's OOM killer ended
WANTED = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
HOLES = re.compile(r"([\d.]+) (bytes|KiB|MiB|GiB) is reserved by PyTorch but unallocated")
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
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


def memory_holes(text: str) -> dict[str, int]:
    """Return what torch's message says: the bytes that were wanted, and those that were reserved and free in pieces.

    Empty if it does not say both, as for a host.
    """
    wanted, holes = WANTED.search(text), HOLES.search(text)
    if wanted is None or holes is None:
        return {}
    found = {"wanted_bytes": wanted, "hole_bytes": holes}
    return {name: int(float(match[1].rstrip(".")) * UNITS[match[2]]) for name, match in found.items()}
