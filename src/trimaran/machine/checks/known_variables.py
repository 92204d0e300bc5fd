"""What environment variables do, from the documentation and sources of NCCL and torch, read 2026-11-15.

docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, pytorch.org/docs/stable/notes/cuda.html and
pytorch.org/docs/stable/torch_nccl_environment_variables.html.
"""

from functools import cache
from importlib.resources import files

import yaml

USELESS = {
    "NCCL_TIMEOUT": "is not read by NCCL: the timeout is an argument of the process group (faults in the recipe)",
    "NCCL_LAUNCH_TIMEOUT": "is not read by NCCL",
    "PYTORCH_NCCL_TIMEOUT": "is not read by torch",
    "CUDA_VISIBLE_DEVICE": "has no effect: the name is CUDA_VISIBLE_DEVICES",
    "TORCH_DISTRIBUTED_TIMEOUT": "is not read by torch",
}

OLD_NAMES = {
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "NCCL_IB_GDR_LEVEL": "NCCL_NET_GDR_LEVEL",
    "NCCL_MAX_NRINGS": "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NRINGS": "NCCL_MIN_NCHANNELS",
}

ON = ("1", "TRUE", "YES", "ON")
OFF = ("0", "FALSE", "NO", "OFF")
# Name: harmful values (empty: any value), their effect, and whether it only matters on GPUs.
HARMFUL: dict[str, tuple[tuple[str, ...], str, bool]] = {
    "NCCL_IB_DISABLE": (ON, "disables InfiniBand: nodes communicate over TCP sockets", True),
    "NCCL_P2P_DISABLE": (ON, "disables peer access between GPUs: NVLink is not used", True),
    "NCCL_P2P_LEVEL": (("LOC", "0"), "disables peer access between GPUs: NVLink is not used", True),
    "NCCL_SHM_DISABLE": (ON, "sends messages inside one machine over the network", True),
    "NCCL_NVLS_ENABLE": (OFF, "disables in-switch reductions (NVLink SHARP)", True),
    "NCCL_NET_GDR_LEVEL": (("LOC", "0"), "disables GPUDirect RDMA: messages are copied through host memory", True),
    "NCCL_ALGO": ((), "pins one algorithm for all message sizes; NCCL calls it a debugging variable", True),
    "NCCL_PROTO": ((), "pins one protocol for all message sizes; NCCL calls it a debugging variable", True),
    "NCCL_MAX_NCHANNELS": (("1", "2"), "leaves most of the links idle", True),
    "NCCL_DEBUG": (("INFO", "TRACE"), "makes NCCL log heavily", True),
    "NCCL_CHECK_POINTERS": (ON, "checks every pointer of every call", True),
    "CUDA_LAUNCH_BLOCKING": (ON, "makes the host wait for every kernel", True),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (ON, "allocates every tensor with cudaMalloc", True),
    "CUDA_DEVICE_MAX_CONNECTIONS": (("1",), "serialises kernel launches, so that little overlaps", True),
    "NVIDIA_TF32_OVERRIDE": (OFF, "keeps matmuls off the tensor cores", True),
    "TORCH_NCCL_BLOCKING_WAIT": (ON, "makes the host wait for every collective", True),
    "TORCH_NCCL_NAN_CHECK": (ON, "scans every message for NaN", True),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "adds a collective to check every collective", False),
    "TORCHDYNAMO_DISABLE": (ON, "disables torch.compile", False),
    "TORCH_COMPILE_DISABLE": (ON, "disables torch.compile", False),
    "PYTHONMALLOC": (("DEBUG", "PYMALLOC_DEBUG", "MALLOC_DEBUG"), "checks every Python allocation", False),
    "PYTHONDEVMODE": (ON, "enables Python's run-time checks", False),
    "ATEN_CPU_CAPABILITY": (("DEFAULT",), "disables torch's vectorised CPU kernels", False),
}

# Values of NCCL_ALGO and NCCL_PROTO, in any case of letters, up to 2.32. Collnet was one up to 2.13.
ALGORITHMS = ("Ring", "Tree", "CollnetChain", "CollnetDirect", "NVLS", "NVLSTree", "PAT", "Collnet")
PROTOCOLS = ("LL", "LL128", "Simple")
NCCL_FUNCTIONS = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")

ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@cache
def known_names(whose: str) -> frozenset[str]:
    """Return the names that NCCL (`nccl`) or torch's CUDA allocator (`allocator`) reads."""
    return frozenset(yaml.safe_load((files("trimaran.machine.checks") / "variable_names.yaml").read_text())[whose])
