"""Imports a DCP checkpoint, from Trimaran or torch FSDP, as a step that a run can resume from."""

import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from trimaran.checkpoint.convert.convert import Progress, read_full_tensor, refuse_occupied
from trimaran.checkpoint.convert.dcp_read import DcpSource
from trimaran.checkpoint.durable import DurableDisk, remove_tree
from trimaran.checkpoint.manifest import Manifest
from trimaran.checkpoint.step_dirs import draft_path, step_path
from trimaran.checkpoint.write_checkpoint import commit, write_share
from trimaran.core import Recipe, UserError
from trimaran.models.from_hf import disk_layout
from trimaran.nets import Decoder, adapter_parameters, attach_adapter, open_network
from trimaran.parallel.tensor_regions import VALUE_BYTES, TensorIndex, TensorMeta
from trimaran.parallel.tensor_shards import (
    DTYPE_NAMES,
    TORCH_DTYPES,
    TensorShard,
    build_share,
    copy_to_memory,
)

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"
FILE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ImportedTensor:
    """A tensor of the run and its keys in the DCP folder: one key, or one for each expert. Without keys it is zeros."""

    key: str
    meta: TensorMeta
    keys: tuple[str, ...]

    def read(self, source: DcpSource) -> Tensor:
        dtype = TORCH_DTYPES[self.meta.dtype]
        if not self.keys:
            return torch.zeros(self.meta.shape, dtype=dtype)
        values = [read_full_tensor(source, key).to(dtype) for key in self.keys]
        return (values[0] if len(values) == 1 else torch.stack(values)).view(self.meta.shape)


@dataclass(frozen=True, slots=True)
class ImportedTensors:
    """The tensors to import from a DCP folder. `step` is that of the optimizer; 0 if there are only weights."""

    tensors: tuple[ImportedTensor, ...]
    step: int
    with_moments: bool


def write_imported_tensors(
    imported: ImportedTensors, source: DcpSource, folder: Path, *, manifest: Manifest, progress: Progress
) -> Path:
    """Write the imported tensors as a checkpoint into `folder`, the checkpoints of a run, and return its path.

    `manifest` has everything but the files. A batch of tensors is in memory at a time and makes one file, as if a rank
    had written it.
    """
    disk, draft = DurableDisk(), draft_path(folder, manifest.step, secrets.token_hex(4))
    final = step_path(folder, manifest.step)
    refuse_occupied(final)
    reports = []
    done, total = 0, len(imported.tensors)
    try:
        for number, batch in enumerate(_batches(imported.tensors)):
            shards = []
            for each in batch:
                tensor, shape = each.read(source), each.meta.shape
                shards.append(TensorShard(key=each.key, tensor=tensor, shape=shape, start=(0,) * tensor.ndim))
            share = build_share(shards, [(0, shard.shape[0] if shard.shape else 1) for shard in shards])
            memory = torch.zeros(share.num_bytes, dtype=torch.uint8)
            copy_to_memory(share, shards, memory)
            del shards, tensor
            reports.append(write_share(draft, number, share, memory.numpy().data, previous=None, disk=disk))
            del memory  # before the next batch is allocated
            done += len(batch)
            progress("writing the checkpoint", done / total)
        commit(draft, final, reports, manifest, disk)
    finally:
        if draft.is_dir():
            remove_tree(draft, disk)
    return final


def _batches(tensors: Iterable[ImportedTensor]) -> Iterator[list[ImportedTensor]]:
    """Yield the tensors in order, in batches of about `FILE_BYTES`."""
    batch: list[ImportedTensor] = []
    num_bytes = 0
    for each in tensors:
        batch.append(each)
        num_bytes += prod(each.meta.shape) * VALUE_BYTES[each.meta.dtype]
        if num_bytes >= FILE_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class KeyMapping:
    """The names of the weights in a DCP folder: a common prefix, and their names by our parameter name."""

    prefix: str
    names: Mapping[str, tuple[str, ...]]

    def keys(self, name: str) -> tuple[str, ...]:
        return tuple(self.prefix + each for each in self.names[name])

    def absent(self, index: TensorIndex) -> list[str]:
        return [key for name in self.names for key in self.keys(name) if key not in index]


def find_imported_tensors(source: DcpSource, recipe: Recipe) -> ImportedTensors:
    """Return the keys in `source` for every tensor of the recipe's run.

    Names may have any prefix, such as `model.` or `app.model.`, and may be those of Hugging Face. Weights are converted
    to fp32, and so are moments if the run has them in fp32. Missing moments start as zeros. Of a run with an adapter,
    only what is trained is imported: the base is that of the recipe.
    """
    network, _ = open_network(recipe.model)
    adapter = recipe.model.adapter
    if adapter is not None:
        attach_adapter(network, adapter)
    parameters = network.module.named_parameters() if adapter is None else adapter_parameters(network.module)
    wanted = {name: tuple(each.shape) for name, each in parameters}
    # The mapping under which `source` has all weights. Raises UserError with what the best one lacks.
    namings: list[dict[str, tuple[str, ...]]] = [{name: (name,) for name in wanted}]
    if isinstance(network.module, Decoder):
        spec = network.module.spec
        parts = {name: disk_layout(spec)(name, shape, spec) for name, shape in wanted.items()}
        if not any(each.region or each.transposed for some in parts.values() for each in some):
            namings.append({name: tuple(each.name for each in some) for name, some in parts.items()})
    tried = [
        KeyMapping(each, names) for names in namings for each in _prefixes(source.index, next(iter(names.values()))[0])
    ]
    mapping = min(tried, key=lambda each: len(each.absent(source.index)), default=None)
    absent = mapping.absent(source.index) if mapping else list(wanted)
    if mapping is None or absent:
        raise UserError(
            "K023.checkpoint-lacks-weights",
            where=str(source.folder),
            num_absent=len(absent),
            absent=", ".join(absent[:3]),
        )
    weights = [
        ImportedTensor(f"model/{name}", TensorMeta("F32", shape), mapping.keys(name)) for name, shape in wanted.items()
    ]
    states = _states(source, mapping)
    in_fp32 = recipe.train.optimizer.states == "fp32"
    if not states and not in_fp32:
        raise UserError("K027.checkpoint-no-optimizer", where=str(source.folder))
    moments = [each for name in wanted for each in _moments(name, wanted[name], states.get(name, {}), source)]
    if in_fp32:
        moments = [replace(each, meta=TensorMeta("F32", each.meta.shape)) for each in moments]
    buffers = dict(network.module.named_buffers())
    persistent = [
        ImportedTensor(
            f"model/{name}", TensorMeta(DTYPE_NAMES[each.dtype], tuple(each.shape)), (mapping.prefix + name,)
        )
        for name, each in network.module.state_dict().items()
        if name in buffers and mapping.prefix + name in source.index
    ]
    tensors = (*weights, *persistent, *moments)
    for each in tensors:
        shape, count = each.meta.shape, len(each.keys)
        for key in each.keys:
            found = source.index[key].meta.shape
            if (count, *found) != shape and not (count == 1 and found == shape):
                raise UserError(
                    "K023.checkpoint-run-model", where=str(source.folder), key=key, found=list(found), shape=list(shape)
                )
    steps = [read_full_tensor(source, each.keys[0]) for each in moments if each.key.split("/")[1] == STEP and each.keys]
    return ImportedTensors(tensors, int(max(steps, default=torch.zeros(()))), bool(steps))


def _prefixes(keys: Iterable[str], name: str) -> list[str]:
    """Return the prefixes of the keys that end with `name`, shortest first."""
    return sorted({key.removesuffix(name) for key in keys if key == name or key.endswith(f".{name}")}, key=len)


def _states(source: DcpSource, mapping: KeyMapping) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the keys of the optimizer states, by our parameter name and state name."""
    first = next(iter(mapping.names.values()))[0]
    by_parameter: dict[str, dict[str, str]] = {}
    for key in source.index:
        parameter, _, state = key.rpartition(".")
        by_parameter.setdefault(parameter, {})[state] = key
    prefixes = _prefixes((parameter for parameter, states in by_parameter.items() if MOMENTS[0] in states), first)
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for prefix in prefixes[:1]:
        for name, theirs in mapping.names.items():
            states = [by_parameter.get(prefix + each, {}) for each in theirs]
            shared = [state for state in states[0] if all(state in each for each in states)]
            found[name] = {state: tuple(each[state] for each in states) for state in shared}
    return found


def _moments(
    name: str, shape: tuple[int, ...], states: Mapping[str, tuple[str, ...]], source: DcpSource
) -> Iterator[ImportedTensor]:
    """Yield the AdamW states of one parameter; 8-bit states have scales as well."""
    if STEP not in states or not all(each in states for each in MOMENTS):
        states = dict.fromkeys((*MOMENTS, STEP), ())
    for state, keys in states.items():
        base = state.partition("_scale")[0]
        if state == STEP:
            yield ImportedTensor(f"optimizer/{STEP}/{name}", TensorMeta("F32", ()), keys[:1])
        elif base in MOMENTS:
            stored = source.index[keys[0]].meta if keys else TensorMeta("F32", shape)
            yield ImportedTensor(
                f"optimizer/{state}/{name}", TensorMeta(stored.dtype, shape if state == base else stored.shape), keys
            )
