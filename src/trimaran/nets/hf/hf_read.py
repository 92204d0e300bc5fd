"""Reads this rank's slices of safetensors into a Hugging Face model, which may rename or fuse tensors in memory."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from trimaran.nets.hf_weights import damaged, open_weights
from trimaran.nets.local_shards import local_part, local_slices
from trimaran.nets.nf4_linear import loadable_weights, weight_to_fill

try:
    from transformers import conversion_mapping, core_model_loading
except ImportError:  # transformers before 5 keeps weights in memory as they are on disk
    conversion_mapping = core_model_loading = None


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The tensors on disk that become `target` in memory: one, or several that transformers' `converter` fuses.

    `tensors` are names on disk, each with the converter's pattern that it matches.
    """

    target: str
    tensors: tuple[tuple[str, str], ...]
    converter: Any = None

    @property
    def name(self) -> str:
        """The single name on disk; of several names for the same tensor the last, as in transformers."""
        return self.tensors[-1][0]

    def convert(self, module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the converted tensors, given `values` by name on disk; there may be more than the target."""
        converter = deepcopy(self.converter)  # it keeps its inputs
        for name, pattern in self.tensors:
            converter.add_tensor(self.target, name, pattern, values[name])
        result = converter.convert(self.target, model=module, config=module.config)
        by_target = result[0] if isinstance(result, tuple) else result  # the first 5.x also return errors
        for target, tensor in by_target.items():
            yield target, tensor[0] if isinstance(tensor, list) else tensor


def find_weight_sources(module: Any, folder: Path) -> tuple[list[WeightSource], str]:
    """Return where the weights of a meta-device module are on disk, and why that is not clear (empty if it is)."""
    wanted = module.state_dict()
    with ExitStack() as stack:
        files = open_weights(folder, stack)
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}
    sources = _weight_sources(module, wanted, list(shapes))
    found: dict[str, tuple[int, ...]] = {}
    for source in sources:
        if source.converter is None:
            found[source.target] = shapes[source.name]
        else:
            values = {name: torch.empty(shapes[name], device="meta") for name, _ in source.tensors}
            found |= {name: tuple(each.shape) for name, each in source.convert(module, values)}
    return sources, _mismatch(module, {name: tuple(each.shape) for name, each in wanted.items()}, found)


def keep_conversions(module: Any) -> None:
    """Keep how transformers renames and splits the weights of a new model on saving: it asks by the name of its class.

    A plan changes that name.
    """
    if conversion_mapping is None or core_model_loading is None or hasattr(module, "_weight_conversions"):
        return
    find: Any = conversion_mapping.get_model_conversion_mapping
    conversions = find(module, **({"add_legacy": False} if "add_legacy" in signature(find).parameters else {}))
    prefix_change = getattr(core_model_loading, "PrefixChange", ())  # tells only how a folder was read
    if conversions := [each for each in conversions if not isinstance(each, prefix_change)]:
        module._weight_conversions = conversions


def read_weights(
    module: nn.Module, folder: Path, sources: list[WeightSource], report_progress: Callable[[], None] = lambda: None
) -> None:
    """Fill the module in place with this rank's slices, in its own dtypes. Fused tensors are briefly unsharded.

    A pipeline stage reads only what it holds. `report_progress` is called after each source.
    """
    targets = dict(module.named_buffers()) | loadable_weights(module, remove_duplicate=False)
    with ExitStack() as stack, torch.no_grad():
        files = open_weights(folder, stack)
        try:
            for source in [each for each in sources if each.target in targets]:
                if source.converter is None:
                    _copy(module, source.target, targets, files[source.name].get_slice(source.name))
                else:
                    values = {name: files[name].get_tensor(name) for name, _ in source.tensors}
                    for target, tensor in source.convert(module, values):
                        if target in targets:
                            _copy(module, target, targets, tensor)
                report_progress()
        except SafetensorError as error:
            raise damaged(folder, error) from None


def _copy(module: nn.Module, name: str, targets: Mapping[str, Tensor], value: Any) -> None:
    with weight_to_fill(module, name, targets[name]) as target:
        local = local_part(target)
        if local.numel():
            local.copy_(value[local_slices(target) or ...])  # a scalar has no slices


def _weight_sources(module: Any, wanted: dict[str, Tensor], on_disk: list[str]) -> list[WeightSource]:
    """Return the sources of all targets, with names mapped, prefixed and fused as transformers does it."""
    prefix = module.base_model_prefix
    if conversion_mapping is None or core_model_loading is None:
        targets = {_prefixed(name, prefix, wanted): name for name in on_disk}
        return [WeightSource(target, ((name, name),)) for target, name in targets.items() if target in wanted]
    conversions = conversion_mapping.get_model_conversion_mapping(module)
    renamings = [each for each in conversions if isinstance(each, core_model_loading.WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, core_model_loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    tensors: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(on_disk, key=core_model_loading.dot_natural_key):  # experts in the order of their numbers
        target, pattern = core_model_loading.rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = name, None
        if target in wanted:
            tensors.setdefault(target, []).append((name, pattern or name))
    if all(hasattr(each, "was_used") for each in conversions):  # for saving; the first 5.x do not need it
        module._weight_conversions = [each for each in conversions if each.was_used()]
    return [WeightSource(target, tuple(names), by_pattern.get(names[0][1])) for target, names in tensors.items()]


def _prefixed(name: str, prefix: str, wanted: Mapping[str, Tensor]) -> str:
    """Return the name in memory of a tensor that was saved with or without the base model's prefix."""
    return next((each for each in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")) if each in wanted), name)


def _mismatch(module: nn.Module, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str:
    """Return the first weight that is missing, present twice or of another shape; empty if there is none."""
    owners: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    tied = {name: names for names in owners.values() for name in names}
    for name, shape in wanted.items():
        present = [each for each in tied.get(name, [name]) if each in found]
        if len(present) != 1:
            return f"{name} is {'not' if not present else 'twice'} on disk"
        if found[present[0]] != shape:
            return f"{name} has another shape on disk"
    return ""
