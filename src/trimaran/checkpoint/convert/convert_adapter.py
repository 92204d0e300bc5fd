"""Exports a checkpoint of an adapter, in one process: as a PEFT folder, or merged into whole weights."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from trimaran.checkpoint.convert.convert import (
    DTYPES,
    MODEL_PREFIX,
    Progress,
    not_written,
    read_full_tensor,
    refuse_occupied,
)
from trimaran.checkpoint.convert.export_hf import write_hf_folder
from trimaran.checkpoint.convert.export_peft import AdapterFacts, whole_modules, write_peft_folder
from trimaran.core import AdapterSection, ModelSection, UserError
from trimaran.models import model_folder
from trimaran.nets import open_network
from trimaran.nets.adapters.attach import AdapterLayout, adapter_layout, attach_adapter
from trimaran.nets.adapters.lora_linear import adapter_parameters, adapter_scaling, merge_adapter
from trimaran.nets.adapters.peft_format import peft_tensors
from trimaran.nets.base_weights import BaseWeights, open_base_weights
from trimaran.nets.local_shards import ReadTensor, full_tensor
from trimaran.parallel.tensor_shards import CheckpointSource


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

    def read(parameter: Tensor) -> Tensor:
        return read_full_tensor(source, MODEL_PREFIX + names[parameter])

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for done, (name, tensor) in enumerate(peft_tensors(network, read), 1):
            yield name, tensor.to(DTYPES[dtype])
            progress("writing the adapter", min(1.0, done / len(trained)))

    facts = AdapterFacts(section=section, base=source.progress.get("base") or {}, modules=modules)
    try:
        write_peft_folder(folder, facts, tensors(), add_files=add_files)
    except (OSError, SafetensorError) as error:
        raise not_written(folder, error) from None


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
        read = _merged_reader(base, source, _adapter_of(section))
        total = sum(each.numel() for each in base.network.module.parameters())

        def tensors() -> Iterator[tuple[str, Tensor]]:
            done = 0
            for name, tensor in base.network.disk_tensors(read):
                is_cast = dtype is not None and tensor.is_floating_point()
                yield name, (tensor.to(DTYPES[dtype]) if is_cast and dtype else tensor).contiguous()
                done += tensor.numel()
                progress("writing the weights", min(1.0, done / max(total, 1)))

        origin = model_folder(section.path) if section.path else None
        names = {"fp32": "float32", "bf16": "bfloat16"}
        config = base.network.disk_config() | {"dtype": names[dtype] if dtype else base.dtype}
        try:
            write_hf_folder(folder, config, tensors(), origin=origin, add_files=add_files)
        except (OSError, SafetensorError) as error:
            raise not_written(folder, error) from None


def _adapter_of(section: ModelSection) -> AdapterSection:
    assert section.adapter is not None, "only runs with an adapter have one to export"
    return section.adapter


def _merged_reader(base: BaseWeights, source: CheckpointSource, section: AdapterSection) -> ReadTensor:
    """Return a function that reads the merged value of a parameter of the base; buffers are read now."""
    layout, module = adapter_layout(base.network, section), base.network.module
    parts = {f"{name}.{part}" for name in layout.targets for part in _parts(section)}
    _refuse_missing(parts | _first_names(base, layout), source)
    names: dict[Tensor, str] = {each: name for name, each in module.named_parameters()}
    for name, buffer in module.named_buffers():
        if MODEL_PREFIX + name in source.index:
            buffer.copy_(read_full_tensor(source, MODEL_PREFIX + name))
        elif name in base.buffers:
            buffer.copy_(base.read(name))

    def read(tensor: Tensor) -> Tensor:
        return full_tensor(_merged(names[tensor], base, layout, source, section) if tensor in names else tensor)

    return read


def _first_names(base: BaseWeights, layout: AdapterLayout) -> set[str]:
    """Return the names under which checkpoints hold what is trained in full: of a tied parameter the first."""
    return {name for name, _ in base.network.module.named_parameters() if name in layout.trained}


def _merged(
    name: str, base: BaseWeights, layout: AdapterLayout, source: CheckpointSource, section: AdapterSection
) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    frozen = base.read(name)
    if name in layout.trained:
        return read_full_tensor(source, MODEL_PREFIX + name).to(frozen.dtype)
    if owner not in layout.targets or leaf != "weight":
        return frozen
    down, up, *norms = (read_full_tensor(source, f"{MODEL_PREFIX}{owner}.{part}") for part in _parts(section))
    magnitude = norms[0] if norms else None
    return merge_adapter(frozen, down, up, scaling=adapter_scaling(section), magnitude=magnitude).to(frozen.dtype)


def _parts(section: AdapterSection) -> tuple[str, ...]:
    return ("lora_A", "lora_B", "lora_magnitude") if section.kind == "dora" else ("lora_A", "lora_B")


def _refuse_missing(names: Any, source: CheckpointSource) -> None:
    if absent := sorted(name for name in names if MODEL_PREFIX + name not in source.index):
        raise UserError("K025", f"the checkpoint does not have {len(absent)} of the adapter's {len(names)} weights, "
                        f"such as {absent[0]}", where="model.adapter",
                        fix="export with the recipe of the run that wrote it")  # fmt: skip
