"""Reads and writes a Decoder's weights as Hugging Face safetensors. No pickle is read: it can run any program."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trimaran.core import UserError, check_regular_file, templated
from trimaran.models import HEAD, DiskPart, ModelSpec, disk_layout, is_extra_layer, weight_files
from trimaran.nets.decoder.decoder import Decoder, PredictionLayer
from trimaran.nets.local_shards import ReadTensor, full_tensor, is_on_meta, local_part, local_slices
from trimaran.nets.nf4_linear import loadable_weights, weight_to_fill

log = logging.getLogger(__name__)
BASE_PREFIX = "model."  # of the names of all tensors but the head
EMBEDDING = "embed_tokens.weight"
ROWS_COMPARED = 4096  # at a time, of an embedding and a head


def joined_tensors(items: Iterable[tuple[DiskPart, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors on disk by name, each as soon as all of its parts have come."""
    started: dict[str, tuple[Tensor, int]] = {}
    for part, value in items:
        if not part.region and not part.transposed:
            yield part.name, value
            continue
        whole, missing = started.get(part.name) or (torch.empty(part.shape, dtype=value.dtype), 0)
        missing = missing or whole.numel()
        whole[part.region].copy_(value.transpose(-2, -1) if part.transposed else value)
        if missing == value.numel():
            started.pop(part.name, None)
            yield part.name, whole
        else:
            started[part.name] = whole, missing - value.numel()
    assert not started, f"some parts of {list(started)} did not come"


def _full_region(part: DiskPart) -> tuple[slice | int, ...]:
    return (*part.region, *[slice(None)] * (len(part.shape) - len(part.region)))


def load_hf_weights(module: nn.Module, folder: Path, report_progress: Callable[[], None] = lambda: None) -> None:
    """Fill a Decoder in place from the safetensors in `folder`, in the parameters' own dtypes.

    Each rank reads only the rows it holds, and a stage only its layers. Names and shapes are checked before the first
    value is written; on the meta device nothing else is done. Neither an adapter nor `absent_layers` are filled.
    `report_progress` is called after each tensor.
    """
    assert isinstance(module, Decoder), "only our decoder has these names"
    with open_sources(folder) as sources:
        absent = _absent_layers(module, sources)
        named = loadable_weights(module) | correction_biases(module)
        parameters = {name: each for name, each in named.items() if not name.startswith(absent)}
        layout = disk_layout(module.spec)
        parts = {name: layout(name, tuple(each.shape), module.spec) for name, each in parameters.items()}
        _refuse_mismatch(parts, sources, folder, module.spec)
        # config.json may tie the head to the embedding, although the head on disk has other values.
        spec = module.spec
        (embedding,) = layout(EMBEDDING, (spec.vocab, spec.hidden), spec)
        if spec.tied and HEAD in sources and embedding.name in sources:
            with torch.device("cpu"):  # a dry run builds on the meta device
                tied, stored = (sources[name].get_slice(name) for name in (embedding.name, HEAD))
                rows = [slice(start, start + ROWS_COMPARED) for start in range(0, spec.vocab, ROWS_COMPARED)]
                are_equal = all(torch.equal(tied[some], stored[some]) for some in rows)
            if not are_equal:
                raise UserError("M075.config-json-ties", where=str(folder))
        if is_on_meta(module):
            return
        log.info("%s is computed by Trimaran's own decoder; model.family=hf uses transformers'", module.spec.name)
        for name, parameter in parameters.items():
            with weight_to_fill(module, name, parameter) as target:
                _copy(target, parts[name], sources)
            report_progress()


def load_named_weights(
    module: nn.Module,
    folder: Path,
    find_mismatches: Callable[[Mapping[str, Any]], Sequence[str]],
    report_progress: Callable[[], None],
    *,
    fix: str,
) -> None:
    """Fill a module in place from safetensors with its own parameter names. Each rank reads only its shards.

    `find_mismatches` compares names and shapes before the first value is written; on the meta device nothing else is
    done. `report_progress` is called after each tensor.
    """
    with open_sources(folder) as sources:
        if wrong := find_mismatches(sources):
            more = templated(", and {num_wrong} more", num_wrong=len(wrong) - 3) if len(wrong) > 3 else ""
            raise UserError("M021.weights-differ", where=str(folder), fix=fix, wrong=", ".join(wrong[:3]), more=more)
        if is_on_meta(module):
            return
        for name, parameter in module.named_parameters():
            if (local := local_part(parameter)).numel():
                local.copy_(sources[name].get_slice(name)[local_slices(parameter)])
            report_progress()


@contextmanager
def open_sources(folder: Path) -> Iterator[dict[str, Any]]:
    """Open the weights in a folder to fill a module in place. See `open_weights`."""
    with ExitStack() as stack, torch.no_grad():
        sources = open_weights(folder, stack)
        try:
            yield sources
        except SafetensorError as error:
            raise damaged(folder, error) from None


def decoder_reader(module: nn.Module, spec: ModelSpec, files: Mapping[str, Any]) -> Callable[[str], Tensor]:
    """Return the function that reads a parameter or a correction bias of a Decoder from these open files."""
    layout = disk_layout(spec)
    held = dict(module.named_parameters(remove_duplicate=False)) | correction_biases(module)
    shapes = {name: tuple(each.shape) for name, each in held.items()}

    def read(name: str) -> Tensor:
        shape = shapes[name]
        parts, whole = layout(name, shape, spec), tuple(slice(0, size) for size in shape)
        if not is_stacked(parts, len(shape)):
            return read_part(parts[0], whole, files)
        return torch.stack([read_part(each, whole[1:], files) for each in parts])

    return read


def absent_layers(module: nn.Module, folder: Path) -> tuple[str, ...]:
    """Return the prefixes of prediction layers that the folder lacks: many models are published without them."""
    if not isinstance(module, Decoder) or not module.prediction_layers:
        return ()
    with ExitStack() as stack:
        return _absent_layers(module, open_weights(folder, stack))


def _absent_layers(module: Decoder, sources: Mapping[str, Any]) -> tuple[str, ...]:
    found = {name.split(".")[2] for name in sources if name.startswith("model.layers.")}
    numbers = map(str, range(module.spec.layers, module.spec.num_blocks))
    return tuple(f"layers.{number}." for number in numbers if number not in found)


def hf_tensors(module: nn.Module, spec: ModelSpec, read: ReadTensor = full_tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of a Decoder unsharded, on the CPU, under its Hugging Face name; a tied head is omitted.

    So is the last stage's copy of an embedding, which the first stage has too. Layers that predict later tokens have
    copies of the embedding and the head on disk. Each item is a collective for sharded weights: every rank must take
    every item.
    """
    assert isinstance(module, Decoder), "only our decoder has these names"
    return joined_tensors(_parts_and_values(module, spec, read))


def _parts_and_values(module: Decoder, spec: ModelSpec, read: ReadTensor) -> Iterator[tuple[DiskPart, Tensor]]:
    layout = disk_layout(spec)
    named = [*module.named_parameters(remove_duplicate=False), *correction_biases(module).items()]
    for name, parameter in named:
        if (spec.tied and name == HEAD) or (name == EMBEDDING and not module.is_first):
            continue
        value = read(parameter)
        parts = layout(name, tuple(value.shape), spec)
        if not is_stacked(parts, value.ndim):
            yield parts[0], value
        else:
            yield from ((each, expert.clone()) for each, expert in zip(parts, value, strict=True))
    for number, layer in module.layers.named_children():
        if isinstance(layer, PredictionLayer):
            assert module.embed_tokens is not None
            assert module.lm_head is not None
            copies = {"embed_tokens": module.embed_tokens, "shared_head.head": module.lm_head}
            for name, owner in copies.items():
                value = read(owner.weight)
                yield DiskPart(f"model.layers.{number}.{name}.weight", tuple(value.shape)), value.clone()


def correction_biases(module: nn.Module) -> dict[str, Tensor]:
    """Return the correction biases of the routers by name: buffers that belong to the weights."""
    return {name: each for name, each in module.named_buffers() if name.endswith(".correction_bias")}


def open_weights(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Return the open file that holds each tensor, by the tensor's name."""
    sources: dict[str, Any] = {}
    files = weight_files(folder)
    if not files:
        raise UserError("M020.folder-holds", where=str(folder))
    for path in files:
        try:
            check_regular_file(path, follow_links=True)  # in a Hugging Face cache every file is a link
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise damaged(path, error) from None
        sources |= dict.fromkeys(file.keys(), file)
    return sources


def _refuse_mismatch(
    parts: Mapping[str, Sequence[DiskPart]], sources: Mapping[str, Any], folder: Path, spec: ModelSpec
) -> None:
    missing, misshapen = [], []
    for part in dict.fromkeys((each.name, each.shape) for some in parts.values() for each in some):
        name, shape = part[0], list(part[1])
        if name not in sources:
            missing.append(name)
        elif (found := sources[name].get_slice(name).get_shape()) != shape:
            misshapen.append(f"{name} {found} (the model has {shape})")
    with torch.device("meta"):
        complete = Decoder(spec)
    layout, named = disk_layout(spec), dict(complete.named_parameters()) | correction_biases(complete)
    expected = {part.name for name, each in named.items() for part in layout(name, tuple(each.shape), spec)}
    # Is only the head missing, or were the weights saved from the model inside the language model?
    absent = [each for each in expected if each not in sources]
    elsewhere = [each for each in absent if each.removeprefix(BASE_PREFIX) in sources]
    if absent and {*absent} - {*elsewhere} == {HEAD}:
        raise without_head(f"{HEAD} is not on disk", folder)
    if absent and len(elsewhere) == len(absent):
        raise UserError("M021.names-weights-lack", where=str(folder), base_prefix=BASE_PREFIX)
    # Some checkpoints contain a tied head, which is not read, and the oldest Llamas their rotary tables.
    others = (each for each in sources if each not in expected and each != HEAD and "rotary_emb" not in each)
    unexpected = [each for each in others if not is_extra_layer(each, spec)]
    refuse_problems(missing, misshapen, unexpected, folder)


def refuse_problems(missing: Sequence[str], misshapen: Sequence[str], unexpected: Sequence[str], folder: Path) -> None:
    """Raise if the weights in a folder do not match the model."""
    lists = {"missing": missing, "wrong shape": misshapen, "unexpected": unexpected}
    if problems := [f"{what}: {first_few(names)}" for what, names in lists.items() if names]:
        raise UserError("M021.weights-not-match-model", where=str(folder), problems="; ".join(problems))


def without_head(problem: str, folder: Path) -> UserError:
    return UserError("M093.folder-holds-model", where=str(folder), problem=problem)


def _copy(parameter: Tensor, parts: Sequence[DiskPart], sources: Mapping[str, Any]) -> None:
    local, here = local_part(parameter), local_slices(parameter)
    if local.numel() and not is_stacked(parts, local.ndim):
        local.copy_(read_part(parts[0], here, sources))
    elif local.numel():
        for expert, each in zip(local, parts[here[0]], strict=True):
            expert.copy_(read_part(each, here[1:], sources))


def is_stacked(parts: Sequence[DiskPart], ndim: int) -> bool:
    """Return whether the parts of a parameter with so many dims are its experts."""
    return sum(isinstance(each, slice) for each in _full_region(parts[0])) < ndim


def read_part(part: DiskPart, here: tuple[slice, ...], sources: Mapping[str, Any]) -> Tensor:
    """Return the values `here` of the parameter, or of its expert, that `part` holds. Nothing else is read."""
    here = (*here[:-2], here[-1], here[-2]) if part.transposed else here
    wanted, index, steps = iter(here), list[slice | int](), list[slice]()
    for size, region in zip(part.shape, _full_region(part), strict=True):
        if isinstance(region, int):
            index.append(region)
            continue
        (start, _, step), inner = region.indices(size), next(wanted)
        index.append(slice(start + inner.start * step, max(start + (inner.stop - 1) * step + 1, start)))
        steps.append(slice(None, None, step))
    values = sources[part.name].get_slice(part.name)[tuple(index)]
    if any(each.step != 1 for each in steps):  # safetensors reads ranges only
        values = values[tuple(steps)]
    return values.transpose(-2, -1) if part.transposed else values


def first_few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def damaged(where: Path, error: Exception) -> UserError:
    problem = getattr(error, "strerror", None) or error
    return UserError("M022.weights-cannot-read", where=str(where), problem=problem)
