"""What both versions of torchtitan need to run here: a stub for `datasets`, which is not used, and CPU support."""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def stub_datasets() -> bool:
    """Put an empty `datasets` in its place if the library is missing; return whether it was."""
    if importlib.util.find_spec("datasets") is not None:
        return False
    sys.modules["datasets"] = ModuleType("datasets")
    sys.modules["datasets.distributed"] = ModuleType("datasets.distributed")
    sys.modules["datasets"].__dict__.update(Dataset=None, IterableDataset=None, load_dataset=None)
    sys.modules["datasets.distributed"].__dict__.update(split_dataset_by_node=None)
    return True


def use_cpu_without_gpu(tools: Any, dims: Any) -> None:
    """Let torchtitan's modules `tools` and `dims` use the CPU if there is no GPU."""
    if torch.cuda.is_available():
        return
    torch.cpu.__dict__.update(
        current_device=lambda: 0,
        get_device_name=lambda *_: "cpu",
        get_device_properties=lambda *_: SimpleNamespace(total_memory=1),
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        memory_stats=lambda *_: {},
    )
    tools.device_type = dims.device_type = "cpu"
    tools.device_module = torch.cpu
