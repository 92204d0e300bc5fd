"""Exports a checkpoint as a Hugging Face, PEFT or DCP folder, in one process, one tensor at a time."""

import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.planner import WriteItem

from trimaran.checkpoint.convert.export_hf import sync_folder, write_hf_folder
from trimaran.checkpoint.convert.export_peft import AdapterFacts, whole_modules, write_peft_folder
from trimaran.checkpoint.load_state import fill_shards
from trimaran.core import AdapterSection, ModelSection, UserError
from trimaran.models import model_folder
from trimaran.models.from_hf import disk_layout
from trimaran.nets import Decoder, Network, open_network, peft_tensors
from trimaran.nets.adapters.attach import adapter_layout, attach_adapter
from trimaran.nets.adapters.lora_linear import adapter_parameters, adapter_scaling, merge_adapter
from trimaran.nets.base_weights import BaseWeights, open_base_weights
from trimaran.nets.local_shards import ReadTensor, full_tensor
from trimaran.parallel import TORCH_DTYPES, CheckpointSource, TensorMeta, TensorShard

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
    """Write the weights in `source` as a Hugging Face folder, like a run's own `model/`. `add_files`: the tokenizer."""
    refuse_occupied(folder)
    network, _ = open_network(section)
    config = network.disk_config() | ({"dtype": "bfloat16"} if dtype == "bf16" else {})
    tensors = _cast(network, _reader(network.module, source), dtype, progress)
    origin = model_folder(section.path) if section.path else None
    with reporting_errors(folder):
        write_hf_folder(folder, config, tensors, origin=origin, add_files=add_files)


def _cast(network: Network, read: ReadTensor, dtype: str | None, progress: Progress) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a folder, in this dtype or else in their own."""
    done, total = 0, sum(each.numel() for each in network.module.parameters())
    for name, tensor in network.disk_tensors(read):
        yield name, (tensor.to(DTYPES[dtype]) if dtype and tensor.is_floating_point() else tensor).contiguous()
        done += tensor.numel()
        progress("writing the weights", min(1.0, done / max(total, 1)))


def export_dcp(source: CheckpointSource, section: ModelSection, folder: Path, *, progress: Progress) -> dict[str, str]:
    """Write weights and optimizer states of `source` as a DCP folder; return the source's key of each exported key."""
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
        with reporting_errors(folder):
            draft.parent.mkdir(parents=True, exist_ok=True)
            write_dcp(metas, draft, read)
            sync_folder(draft)
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return keys


def refuse_occupied(folder: Path) -> None:
    """Raise UserError if `folder` exists: an export never overwrites."""
    if folder.is_symlink() or folder.exists():
        raise UserError("K024.path-already-exists", where=str(folder))


def _reader(module: nn.Module, source: CheckpointSource) -> ReadTensor:
    """Return a function that reads parameters, and buffers on the meta device; other buffers are read now."""
    named = dict(module.named_parameters())
    buffers = {name: each for name, each in module.named_buffers() if MODEL_PREFIX + name in source.index}
    if absent := [name for name in named if MODEL_PREFIX + name not in source.index]:
        raise UserError(
            "K025.checkpoint-not-model", where="model", num_absent=len(absent), num_named=len(named), absent=absent[0]
        )
    names: dict[Tensor, str] = {each: name for name, each in named.items()}
    for name, buffer in buffers.items():
        if buffer.is_meta:  # of our own networks, which have no memory here
            names[buffer] = name
        else:
            buffer.copy_(read_full_tensor(source, MODEL_PREFIX + name))
    return lambda each: read_full_tensor(source, MODEL_PREFIX + names[each]) if each in names else full_tensor(each)


@contextmanager
def reporting_errors(folder: Path) -> Iterator[None]:
    """Turn an error of writing the export into a UserError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError("K026.export-cannot-written", where=str(folder), error=error) from None


def exported_keys(module: nn.Module, keys: Iterable[str]) -> dict[str, str]:
    """Return the key in the checkpoint of each key in the export.

    A decoder's tensors get their Hugging Face names, and a tied weight all of its names, as in a `state_dict`. A
    decoder with packed or stacked weights keeps its own names, since transformers has other tensors.
    """
    theirs: dict[str, str] = {}  # the Hugging Face name of each tensor
    if isinstance(module, Decoder):
        tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
        persistent = module.state_dict()
        layout = disk_layout(module.spec)
        for name, tensor in tensors.items():
            if name not in persistent:
                continue
            parts = layout(name, tuple(tensor.shape), module.spec)
            if len(parts) != 1 or parts[0].region or parts[0].transposed or parts[0].shape != tuple(tensor.shape):
                theirs = {}  # not one tensor there
                break
            theirs[name] = parts[0].name
    tied: dict[int, list[str]] = {}
    for name, each in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
        tied.setdefault(id(each), []).append(name)
    # The first exported name is that of the optimizer's states.
    names = {some[0]: tuple(theirs.get(each, each) for each in some) for some in tied.values()}
    found = {}
    for key in keys:
        section, _, rest = key.partition("/")
        if section == "model":
            found |= {f"model/{each}": key for each in names.get(rest, (rest,))}
        else:
            state, _, name = rest.partition("/")
            found[f"{section}/{state}/{names.get(name, (name,))[0]}"] = key
    return found


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
    tree: dict[str, Any] = {}  # as of `get_state_dict`: its paths, joined with dots, are the keys on disk
    for dotted, key in keys.items():
        tensor = torch.empty(metas[key].shape, dtype=TORCH_DTYPES[metas[key].dtype], device="meta")
        section, _, rest = dotted.partition(".")
        if section == "optimizer":
            name, _, state = rest.removeprefix("state.").rpartition(".")
            tree.setdefault(section, {}).setdefault("state", {}).setdefault(name, {})[state] = tensor
        else:
            tree.setdefault(section, {})[rest] = tensor
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that only one process saves, as intended here
        dcp.save(
            tree,
            storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=False, sync_files=True, overwrite=False),
            planner=_LazySavePlanner(lambda name: read(keys[name])),
            no_dist=True,
        )


class _LazySavePlanner(dcp.DefaultSavePlanner):
    """Torch's default planner over meta tensors. Reads the values of each tensor only when it is written."""

    def __init__(self, fetch: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._fetch = fetch

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._fetch(write_item.index.fqn)


def export_adapter(
    source: CheckpointSource,
    section: ModelSection,
    folder: Path,
    *,
    dtype: str,
    add_files: Callable[[Path], None],
    progress: Progress,
) -> None:
    """Write the adapter in `source`, a checkpoint of the model in `section`, as a PEFT folder."""
    refuse_occupied(folder)
    network, _ = open_network(section)
    modules = whole_modules(section, network)
    attach_adapter(network, _adapter_of(section))
    trained = dict(adapter_parameters(network.module))
    _refuse_missing(trained, source)
    names: dict[Tensor, str] = {each: name for name, each in trained.items()}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        found = peft_tensors(network, lambda each: read_full_tensor(source, MODEL_PREFIX + names[each]))
        for done, (name, tensor) in enumerate(found, 1):
            yield name, tensor.to(DTYPES[dtype])
            progress("writing the adapter", min(1.0, done / len(trained)))

    facts = AdapterFacts(section=section, base=source.progress.get("base") or {}, modules=modules)
    with reporting_errors(folder):
        write_peft_folder(folder, facts, tensors(), add_files=add_files)


def export_merged(
    source: CheckpointSource,
    section: ModelSection,
    folder: Path,
    *,
    seed: int,
    dtype: str | None,
    add_files: Callable[[Path], None],
    progress: Progress,
) -> None:
    """Write the base with the adapter in `source` merged, as a Hugging Face folder. One tensor at a time is merged.

    A merged weight is computed in fp32 and rounded once, to `dtype`, or without it to the dtype of that weight in the
    base. `seed` is that of a base without weight files.
    """
    refuse_occupied(folder)
    with ExitStack() as stack:
        base = open_base_weights(section.model_copy(update={"adapter": None}), seed, stack)
        tensors = _cast(base.network, _merged_reader(base, source, _adapter_of(section)), dtype, progress)
        names = {"fp32": "float32", "bf16": "bfloat16"}
        config = base.network.disk_config() | {"dtype": names[dtype] if dtype else base.dtype}
        origin = model_folder(section.path) if section.path else None
        with reporting_errors(folder):
            write_hf_folder(folder, config, tensors, origin=origin, add_files=add_files)


def _adapter_of(section: ModelSection) -> AdapterSection:
    assert section.adapter is not None, "only runs with an adapter have one to export"
    return section.adapter


def _merged_reader(base: BaseWeights, source: CheckpointSource, section: AdapterSection) -> ReadTensor:
    """Return a function that reads the merged value of a parameter of the base; buffers are read now."""
    layout, module = adapter_layout(base.network, section), base.network.module
    parts = ("lora_A", "lora_B", *(["lora_magnitude"] if section.kind == "dora" else []))
    # Of a tied parameter, checkpoints hold the first name.
    whole = {name for name, _ in module.named_parameters() if name in layout.trained}
    _refuse_missing({f"{name}.{part}" for name in layout.targets for part in parts} | whole, source)
    names: dict[Tensor, str] = {each: name for name, each in module.named_parameters()}
    for name, buffer in module.named_buffers():
        if MODEL_PREFIX + name in source.index:
            buffer.copy_(read_full_tensor(source, MODEL_PREFIX + name))
        elif name in base.buffers:
            buffer.copy_(base.read(name))

    def merged(name: str) -> Tensor:
        owner, _, leaf = name.rpartition(".")
        frozen = base.read(name)
        if name in layout.trained:
            return read_full_tensor(source, MODEL_PREFIX + name).to(frozen.dtype)
        if owner not in layout.targets or leaf != "weight":
            return frozen
        down, up, *norms = (read_full_tensor(source, f"{MODEL_PREFIX}{owner}.{part}") for part in parts)
        magnitude, scaling = norms[0] if norms else None, adapter_scaling(section)
        return merge_adapter(frozen, down, up, scaling=scaling, magnitude=magnitude).to(frozen.dtype)

    return lambda tensor: full_tensor(merged(names[tensor]) if tensor in names else tensor)


def _refuse_missing(names: Any, source: CheckpointSource) -> None:
    if absent := sorted(name for name in names if MODEL_PREFIX + name not in source.index):
        raise UserError(
            "K025.checkpoint-not-adapter",
            where="model.adapter",
            num_absent=len(absent),
            num_names=len(names),
            absent=absent[0],
        )
