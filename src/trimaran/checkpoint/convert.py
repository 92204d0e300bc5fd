"""A checkpoint becomes a Hugging Face or a DCP folder, on one process, a tensor at a time."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from trimaran.checkpoint.dcp_read import DcpSource
from trimaran.checkpoint.dcp_write import write_dcp
from trimaran.checkpoint.export_hf import settle, write_hf_folder
from trimaran.checkpoint.load_state import fill
from trimaran.checkpoint.rank_share import TORCH_DTYPES
from trimaran.checkpoint.tensor_shards import Source, TensorShard
from trimaran.core import ModelSection, UserError
from trimaran.models import model_folder, spec_of
from trimaran.nets import Network, network_of

WEIGHTS = "model/"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Progress = Callable[[str, float], None]


def dcp_source(folder: Path) -> DcpSource:
    """Return what `torch.distributed.checkpoint.save` wrote to a folder, under the keys that it has there."""
    return DcpSource(folder)


def read_whole(source: Source, key: str) -> Tensor:
    """Return a tensor put together from all its parts."""
    whole = source.index[key].whole
    tensor = torch.empty(whole.shape, dtype=TORCH_DTYPES[whole.dtype])
    fill([TensorShard(key=key, tensor=tensor, shape=whole.shape, start=(0,) * len(whole.shape))], source)
    return tensor


def export_hf(
    source: Source,
    section: ModelSection,
    folder: Path,
    *,
    dtype: str,
    beside: Callable[[Path], None],
    progress: Progress,
) -> None:
    """Write the weights of `source`, a checkpoint of the model in `section`, as a Hugging Face folder.

    It is what the run itself leaves in `model/`. `beside` adds the tokenizer.
    """
    refuse_occupied(folder)
    network = hollow_network(section)
    _lend(network.module, source)
    total = sum(each.numel() for each in network.module.parameters())

    def tensors() -> Iterator[tuple[str, Tensor]]:
        done = 0
        for name, tensor in network.disk_tensors():
            yield name, tensor.to(DTYPES[dtype]) if tensor.is_floating_point() else tensor
            done += tensor.numel()
            progress("writing the weights", done / max(total, 1))

    origin = model_folder(section.path) if section.path else None
    config = network.disk_config() | ({"dtype": "bfloat16"} if dtype == "bf16" else {})
    try:
        write_hf_folder(folder, config, tensors(), origin=origin, beside=beside)
    except (OSError, SafetensorError) as error:
        raise _not_written(folder, error) from None


def export_dcp(source: Source, folder: Path, *, progress: Progress) -> None:
    """Write the tensors of `source`, weights and optimizer states, as a DCP folder."""
    refuse_occupied(folder)
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    wholes = {key: entry.whole for key, entry in source.index.items()}
    written: list[str] = []

    def read(key: str) -> Tensor:
        written.append(key)
        progress("writing the tensors", len(written) / len(wholes))
        return read_whole(source, key)

    try:
        draft.parent.mkdir(parents=True, exist_ok=True)
        write_dcp(wholes, draft, read)
        settle(draft)
        draft.rename(folder)
    except OSError as error:
        raise _not_written(folder, error) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def hollow_network(section: ModelSection) -> Network:
    """Return the network that `section` names, whole, its parameters without memory."""
    if section.family == "hf":
        from trimaran.nets.hf_build import open_hf_model  # noqa: PLC0415  transformers takes seconds to import
        from trimaran.nets.hf_vlm import network_of_hf  # noqa: PLC0415

        assert section.path is not None, "a section without a path has no spec to plan with"
        module, _ = open_hf_model(Path(section.path), trust_remote_code=section.trust_remote_code, seed=0)
        return network_of_hf(module, spec_of(section))
    spec = spec_of(section)
    assert spec is not None, "only a foreign Hugging Face architecture has no spec"
    with torch.device("meta"):
        return network_of(spec)


def refuse_occupied(folder: Path) -> None:
    """Raise when something is there already: an export never overwrites."""
    if folder.is_symlink() or folder.exists():
        raise UserError("K024", "there is something of this name already", where=str(folder),
                        fix="choose another folder: --out DIR")  # fmt: skip


def _lend(module: nn.Module, source: Source) -> None:
    """Let every parameter fetch its value from `source` when it is wanted, and give buffers theirs at once."""
    named: dict[str, Any] = dict(module.named_parameters())
    buffers = {name: each for name, each in module.named_buffers() if WEIGHTS + name in source.index}
    if absent := [name for name in named if WEIGHTS + name not in source.index]:
        raise UserError("K025", f"the checkpoint does not have {len(absent)} of the model's {len(named)} weights, "
                        f"such as {absent[0]}", where="model",
                        fix="export with the recipe of the run that it is of")  # fmt: skip
    for name, parameter in named.items():
        parameter.gather_whole = lambda key=WEIGHTS + name: read_whole(source, key)
    for name, buffer in buffers.items():
        buffer.copy_(read_whole(source, WEIGHTS + name))


def _not_written(folder: Path, error: Exception) -> UserError:
    return UserError("K026", f"the export cannot be written: {error}", where=str(folder),
                     fix="make room, or choose another disk: --out DIR")  # fmt: skip
