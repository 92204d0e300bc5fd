"""Safetensors into a Hugging Face model, slice by slice. transformers may name or fuse them otherwise in memory."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from trimaran.nets.hf_weights import damaged, open_weights
from trimaran.nets.local_shards import local_part, local_slices

try:
    from transformers import conversion_mapping, core_model_loading
except ImportError:  # transformers before 5 keeps weights in memory as they are on disk
    conversion_mapping = core_model_loading = None


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """What becomes `target` in memory: one tensor on disk, or several that transformers' own `converter` fuses.

    `sources` are names on disk, each with the pattern of the converter that it fits.
    """

    target: str
    sources: tuple[tuple[str, str], ...]
    converter: Any = None

    @property
    def name(self) -> str:
        """The one name on disk; of several that mean the same, the last, as with transformers."""
        return self.sources[-1][0]

    def convert(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield what the converter makes of the tensors, by name on disk; it may be more than the target."""
        converter = deepcopy(self.converter)  # it keeps what it is given
        for name, pattern in self.sources:
            converter.add_tensor(self.target, name, pattern, tensors[name])
        made = converter.convert(self.target, model=module, config=module.config)
        by_target = made[0] if isinstance(made, tuple) else made  # the first 5.x answer with their errors as well
        for target, tensor in by_target.items():
            yield target, tensor[0] if isinstance(tensor, list) else tensor


def pieces_on_disk(module: Any, folder: Path) -> tuple[list[WeightSlice], str]:
    """Return where the weights of a module without memory are on disk, or why that is for transformers to find out."""
    wanted = module.state_dict()
    with ExitStack() as stack:
        files = open_weights(folder, stack)
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}
    pieces = _pieces(module, wanted, list(shapes))
    found: dict[str, tuple[int, ...]] = {}
    for piece in pieces:
        if piece.converter is None:
            found[piece.target] = shapes[piece.name]
        else:
            hollow = {name: torch.empty(shapes[name], device="meta") for name, _ in piece.sources}
            found |= {name: tuple(each.shape) for name, each in piece.convert(module, hollow)}
    return pieces, _flaw(module, {name: tuple(each.shape) for name, each in wanted.items()}, found)


def read_pieces(module: nn.Module, folder: Path, pieces: list[WeightSlice]) -> None:
    """Fill the module in place with this rank's slices, in its own dtypes. What is fused is whole for a moment."""
    homes = dict(module.named_buffers()) | dict(module.named_parameters(remove_duplicate=False))
    with ExitStack() as stack, torch.no_grad():
        files = open_weights(folder, stack)
        try:
            for piece in pieces:
                if piece.converter is None:
                    _copy(homes[piece.target], files[piece.name].get_slice(piece.name))
                else:
                    tensors = {name: files[name].get_tensor(name) for name, _ in piece.sources}
                    for target, tensor in piece.convert(module, tensors):
                        _copy(homes[target], tensor)
        except SafetensorError as error:
            raise damaged(folder, error) from None


def _copy(home: Tensor, source: Any) -> None:
    local = local_part(home)
    if local.numel():
        local.copy_(source[local_slices(home) or ...])  # a scalar has no slices


def _pieces(module: Any, wanted: dict[str, Tensor], on_disk: list[str]) -> list[WeightSlice]:
    """Return the pieces that names on disk make up, as transformers would name, prefix and fuse them."""
    prefix = module.base_model_prefix
    if conversion_mapping is None or core_model_loading is None:
        targets = {_prefixed(name, prefix, wanted): name for name in on_disk}
        return [WeightSlice(target, ((name, name),)) for target, name in targets.items() if target in wanted]
    conversions = conversion_mapping.get_model_conversion_mapping(module)
    renamings = [each for each in conversions if isinstance(each, core_model_loading.WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, core_model_loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    sources: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(on_disk, key=core_model_loading.dot_natural_key):  # experts in the order of their numbers
        target, pattern = core_model_loading.rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = name, None
        if target in wanted:
            sources.setdefault(target, []).append((name, pattern or name))
    if all(hasattr(each, "was_used") for each in conversions):  # for the way back to disk; the first 5.x do without
        module._weight_conversions = [each for each in conversions if each.was_used()]
    return [WeightSlice(target, tuple(names), by_pattern.get(names[0][1])) for target, names in sources.items()]


def _prefixed(name: str, prefix: str, wanted: Mapping[str, Tensor]) -> str:
    """Return the name in memory of what was saved with or without the language model's head around it."""
    return next((each for each in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")) if each in wanted), name)


def _flaw(module: nn.Module, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str:
    """Return what transformers has to judge: weights that are not there, of another shape, or there twice."""
    owners: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    tied = {name: names for names in owners.values() for name in names}
    for name, shape in wanted.items():
        there = [each for each in tied.get(name, [name]) if each in found]
        if len(there) != 1:
            return f"{name} is {'not' if not there else 'twice'} on disk"
        if found[there[0]] != shape:
            return f"{name} has another shape on disk"
    return ""
