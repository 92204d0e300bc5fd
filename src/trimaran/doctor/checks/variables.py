"""Which environment variables do what. From NCCL's and torch's own documentation and sources, read 2026-11-15:
docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, pytorch.org/docs/stable/notes/cuda.html and
pytorch.org/docs/stable/torch_nccl_environment_variables.html."""

from functools import cache
from importlib.resources import files

import yaml

USELESS = {
    "NCCL_TIMEOUT": "is not a variable of NCCL: the timeout is an argument of the process group (faults in the recipe)",
    "NCCL_LAUNCH_TIMEOUT": "is not a variable of NCCL",
    "PYTORCH_NCCL_TIMEOUT": "is not a variable of torch",
    "CUDA_VISIBLE_DEVICE": "is read by nobody: the name is CUDA_VISIBLE_DEVICES",
    "TORCH_DISTRIBUTED_TIMEOUT": "is not a variable of torch",
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
# Name: the values that hurt (none: any), what they do, whether on GPUs only.
HARMFUL: dict[str, tuple[tuple[str, ...], str, bool]] = {
    "NCCL_IB_DISABLE": (ON, "turns InfiniBand off: nodes talk over plain sockets", True),
    "NCCL_P2P_DISABLE": (ON, "keeps GPUs from reaching each other: NVLink is not used", True),
    "NCCL_P2P_LEVEL": (("LOC", "0"), "keeps GPUs from reaching each other: NVLink is not used", True),
    "NCCL_SHM_DISABLE": (ON, "sends what is on one machine over the network", True),
    "NCCL_NVLS_ENABLE": (OFF, "turns sums inside NVLink's switches off", True),
    "NCCL_NET_GDR_LEVEL": (("LOC", "0"), "sends what leaves a GPU through host memory", True),
    "NCCL_ALGO": ((), "pins an algorithm for every size of message; NCCL calls it a debugging variable", True),
    "NCCL_PROTO": ((), "pins a protocol for every size of message; NCCL calls it a debugging variable", True),
    "NCCL_MAX_NCHANNELS": (("1", "2"), "leaves most of the links idle", True),
    "NCCL_DEBUG": (("INFO", "TRACE"), "writes a line for much of what NCCL does", True),
    "NCCL_CHECK_POINTERS": (ON, "checks every pointer of every call", True),
    "CUDA_LAUNCH_BLOCKING": (ON, "makes the host wait for every kernel", True),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (ON, "asks the driver for every tensor", True),
    "CUDA_DEVICE_MAX_CONNECTIONS": (("1",), "lets one kernel start at a time, so that little overlaps", True),
    "NVIDIA_TF32_OVERRIDE": (OFF, "keeps products off the tensor cores", True),
    "TORCH_NCCL_BLOCKING_WAIT": (ON, "makes the host wait for every collective", True),
    "TORCH_NCCL_NAN_CHECK": (ON, "reads every message once more", True),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "checks every collective with one of its own", False),
    "TORCHDYNAMO_DISABLE": (ON, "switches compilation off", False),
    "TORCH_COMPILE_DISABLE": (ON, "switches compilation off", False),
    "PYTHONMALLOC": (("DEBUG", "PYMALLOC_DEBUG", "MALLOC_DEBUG"), "checks every allocation of Python", False),
    "PYTHONDEVMODE": (ON, "switches checks of Python on", False),
    "ATEN_CPU_CAPABILITY": (("DEFAULT",), "keeps torch from the CPU's wide registers", False),
}

ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@cache
def known_names(whose: str) -> frozenset[str]:
    """Return the names that NCCL (`nccl`) or torch's allocator (`allocator`) reads."""
    return frozenset(yaml.safe_load((files("trimaran.doctor.checks") / "names.yaml").read_text())[whose])
