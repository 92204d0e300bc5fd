"""A checkpoint as a folder that torch's own `torch.distributed.checkpoint.load` reads."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from trimaran.checkpoint.rank_share import TORCH_DTYPES
from trimaran.checkpoint.tensor_regions import Whole


def dcp_key(key: str) -> str:
    """Return what torch's `get_state_dict` calls what we call `key`: `model.NAME`, `optimizer.state.NAME.exp_avg`."""
    room, _, rest = key.partition("/")
    if room == "optimizer":
        state, _, name = rest.partition("/")
        return f"optimizer.state.{name}.{state}"
    return f"{room}.{rest}"


def write_dcp(wholes: Mapping[str, Whole], folder: Path, read: Callable[[str], Tensor]) -> None:
    """Write the tensors under `wholes` into the new folder. `read` is asked for each in turn, by our key.

    Only one tensor is in memory at a time. For that each gets a file of its own: torch keeps what it has written until
    the file is complete. Of the optimizer there are its tensors and no settings; those are the recipe's.
    """
    keys = {dcp_key(key): key for key in wholes}
    shapes = {name: _hollow(wholes[key]) for name, key in keys.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that nobody else saves along is what we want
        dcp.save(
            _nested(shapes),
            storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=False, sync_files=True, overwrite=False),
            planner=_Planner(lambda name: read(keys[name])),
            no_dist=True,
        )


def _hollow(whole: Whole) -> Tensor:
    return torch.empty(whole.shape, dtype=TORCH_DTYPES[whole.dtype], device="meta")


def _nested(shapes: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the tree that `get_state_dict` gives, whose paths, joined with dots, are the keys on disk."""
    tree: dict[str, Any] = {}
    for name, tensor in shapes.items():
        room, _, rest = name.partition(".")
        if room == "optimizer":
            middle, _, state = rest.removeprefix("state.").rpartition(".")
            tree.setdefault(room, {}).setdefault("state", {}).setdefault(middle, {})[state] = tensor
        else:
            tree.setdefault(room, {})[rest] = tensor
    return tree


class _Planner(dcp.DefaultSavePlanner):
    """Torch's own plan, made from shapes; the values are fetched when their turn comes."""

    def __init__(self, fetch: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._fetch = fetch

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._fetch(write_item.index.fqn)
