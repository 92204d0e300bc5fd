"""Exports a checkpoint as a Hugging Face or DCP folder, in one process, one tensor at a time."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from trimaran.checkpoint.convert.dcp_names import exported_keys
from trimaran.checkpoint.convert.dcp_write import write_dcp
from trimaran.checkpoint.convert.export_hf import sync_folder, write_hf_folder
from trimaran.checkpoint.load_state import fill_shards
from trimaran.core import ModelSection, UserError
from trimaran.models import model_folder
from trimaran.nets import open_network
from trimaran.nets.local_shards import ReadTensor, full_tensor
from trimaran.parallel.tensor_shards import TORCH_DTYPES, CheckpointSource, TensorShard

MODEL_PREFIX = "model/"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Progress = Callable[[str, float], None]


def read_full_tensor(source: CheckpointSource, key: str) -> Tensor:
    """Return a full tensor, assembled from all its regions."""
    meta = source.index[key].meta
    tensor = torch.empty(meta.shape, dtype=TORCH_DTYPES[meta.dtype])
    fill_shards([TensorShard(key=key, tensor=tensor, shape=meta.shape, start=(0,) * len(meta.shape))], source)
    return tensor


def export_hf(
    source: CheckpointSource,
    section: ModelSection,
    folder: Path,
    *,
    dtype: str,
    add_files: Callable[[Path], None],
    progress: Progress,
) -> None:
    """Write the weights of `source`, a checkpoint of the model in `section`, as a Hugging Face folder.

    The result is the same as the run's own `model/` folder. `add_files` adds the tokenizer.
    """
    refuse_occupied(folder)
    network, _ = open_network(section)
    read = _reader(network.module, source)
    total = sum(each.numel() for each in network.module.parameters())

    def tensors() -> Iterator[tuple[str, Tensor]]:
        done = 0
        for name, tensor in network.disk_tensors(read):
            yield name, tensor.to(DTYPES[dtype]) if tensor.is_floating_point() else tensor
            done += tensor.numel()
            progress("writing the weights", done / max(total, 1))

    origin = model_folder(section.path) if section.path else None
    config = network.disk_config() | ({"dtype": "bfloat16"} if dtype == "bf16" else {})
    try:
        write_hf_folder(folder, config, tensors(), origin=origin, add_files=add_files)
    except (OSError, SafetensorError) as error:
        raise not_written(folder, error) from None


def export_dcp(source: CheckpointSource, section: ModelSection, folder: Path, *, progress: Progress) -> dict[str, str]:
    """Write the tensors of `source`, a checkpoint of the model in `section`, and its optimizer's, as a DCP folder.

    Return the key in the checkpoint of each key in the export.
    """
    refuse_occupied(folder)
    if section.adapter is None:
        keys = exported_keys(open_network(section)[0].module, source.index)
    else:  # a part of the weights, which transformers cannot load
        keys = {key: key for key in source.index}
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    metas = {exported: source.index[key].meta for exported, key in keys.items()}
    written: list[str] = []

    def read(key: str) -> Tensor:
        written.append(key)
        progress("writing the tensors", len(written) / len(metas))
        return read_full_tensor(source, keys[key])

    try:
        draft.parent.mkdir(parents=True, exist_ok=True)
        write_dcp(metas, draft, read)
        sync_folder(draft)
        draft.rename(folder)
    except OSError as error:
        raise not_written(folder, error) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return keys


def refuse_occupied(folder: Path) -> None:
    """Raise UserError if `folder` exists: an export never overwrites."""
    if folder.is_symlink() or folder.exists():
        raise UserError("K024", "this path already exists", where=str(folder),
                        fix="choose another folder: --out DIR")  # fmt: skip


def _reader(module: nn.Module, source: CheckpointSource) -> ReadTensor:
    """Return a function that reads parameters, and buffers on the meta device; other buffers are read now."""
    named = dict(module.named_parameters())
    buffers = {name: each for name, each in module.named_buffers() if MODEL_PREFIX + name in source.index}
    if absent := [name for name in named if MODEL_PREFIX + name not in source.index]:
        raise UserError("K025", f"the checkpoint does not have {len(absent)} of the model's {len(named)} weights, "
                        f"such as {absent[0]}", where="model",
                        fix="export with the recipe of the run that wrote it")  # fmt: skip
    names: dict[Tensor, str] = {each: name for name, each in named.items()}
    for name, buffer in buffers.items():
        if buffer.is_meta:  # of our own networks, which have no memory here
            names[buffer] = name
        else:
            buffer.copy_(read_full_tensor(source, MODEL_PREFIX + name))
    return lambda each: read_full_tensor(source, MODEL_PREFIX + names[each]) if each in names else full_tensor(each)


def not_written(folder: Path, error: Exception) -> UserError:
    return UserError("K026", f"the export cannot be written: {error}", where=str(folder),
                     fix="free disk space, or choose another disk: --out DIR")  # fmt: skip
