"""The kinds of devices, and what the planner, the trainer and measurements must know about each."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTraits:
    """What follows from the kind of a device, for one in a catalogue and for a device of torch."""

    backend: str  # of torch.distributed
    group_backends: str  # of a process group that also communicates tensors in host memory

    shares_cores: bool  # any number of ranks are on a node, and compute and communicate with the same cores
    has_own_memory: bool  # beside the host's: copies come from pinned memory, and torch's allocator caches blocks
    has_own_generator: bool  # of random numbers
    runs_async: bool  # the host launches kernels and goes on; events in a stream time them
    has_graphs: bool  # CUDA graphs
    has_kernels: bool  # Triton, and kernels for 4-bit, integer and fp8 weights

    has_data_sheet: bool  # rates and links are known without a measurement
    prefers_16_bits: bool  # computes in 16 bits unless told otherwise
    compiles_by_default: bool
    compiles_recomputed_slices: bool  # tensor-parallel blocks that are recomputed as a whole


_HOST = DeviceTraits(
    backend="gloo",
    group_backends="gloo",
    shares_cores=True,
    has_own_memory=False,
    has_own_generator=False,
    runs_async=False,
    has_graphs=False,
    has_kernels=False,
    has_data_sheet=False,
    prefers_16_bits=False,
    compiles_by_default=False,
    compiles_recomputed_slices=False,
)
# By torch's name of the device type.
DEVICE_TRAITS: dict[str, DeviceTraits] = {
    "cuda": DeviceTraits(
        backend="nccl",
        group_backends="cpu:gloo,cuda:nccl",
        shares_cores=False,
        has_own_memory=True,
        has_own_generator=True,
        runs_async=True,
        has_graphs=True,
        has_kernels=True,
        has_data_sheet=True,
        prefers_16_bits=True,
        compiles_by_default=True,
        compiles_recomputed_slices=True,
    ),
    "cpu": _HOST,
    "meta": _HOST,  # a model without weights, which the host looks at
}
