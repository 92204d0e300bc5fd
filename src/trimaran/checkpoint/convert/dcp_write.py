"""Writes a checkpoint as a folder that `torch.distributed.checkpoint.load` reads."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from trimaran.parallel.tensor_regions import TensorMeta
from trimaran.parallel.tensor_shards import TORCH_DTYPES


def dcp_key(key: str) -> str:
    """Return the name of our `key` in torch's `get_state_dict`: `model.NAME`, `optimizer.state.NAME.exp_avg`."""
    section, _, rest = key.partition("/")
    if section == "optimizer":
        state, _, name = rest.partition("/")
        return f"optimizer.state.{name}.{state}"
    return f"{section}.{rest}"


def write_dcp(metas: Mapping[str, TensorMeta], folder: Path, read: Callable[[str], Tensor]) -> None:
    """Write the tensors in `metas` to a new folder. `read` returns the values of one, by our key.

    Only one tensor is in memory at a time. For that each tensor gets its own file: torch holds what it writes until
    the file is complete. The optimizer's tensors are written, but not its settings: those are in the recipe.
    """
    keys = {dcp_key(key): key for key in metas}
    shapes = {name: _meta_tensor(metas[key]) for name, key in keys.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that only one process saves, as intended here
        dcp.save(
            _nested(shapes),
            storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=False, sync_files=True, overwrite=False),
            planner=_LazySavePlanner(lambda name: read(keys[name])),
            no_dist=True,
        )


def _meta_tensor(meta: TensorMeta) -> Tensor:
    return torch.empty(meta.shape, dtype=TORCH_DTYPES[meta.dtype], device="meta")


def _nested(shapes: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the tree of `get_state_dict`. Its paths, joined with dots, are the keys on disk."""
    tree: dict[str, Any] = {}
    for dotted, tensor in shapes.items():
        section, _, rest = dotted.partition(".")
        if section == "optimizer":
            name, _, state = rest.removeprefix("state.").rpartition(".")
            tree.setdefault(section, {}).setdefault("state", {}).setdefault(name, {})[state] = tensor
        else:
            tree.setdefault(section, {})[rest] = tensor
    return tree


class _LazySavePlanner(dcp.DefaultSavePlanner):
    """Torch's default planner over meta tensors; it reads the values of each tensor only when it is written."""

    def __init__(self, fetch: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._fetch = fetch

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._fetch(write_item.index.fqn)
