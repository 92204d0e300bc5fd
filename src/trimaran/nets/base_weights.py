"""Reads the unsharded weights of a model on disk, one by one, by our parameter names, in the dtypes of the files."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimaran.core import ModelSection
from trimaran.models import model_folder, weight_files
from trimaran.nets.decoder.moe import MoeLayer
from trimaran.nets.hf_weights import correction_biases, open_weights
from trimaran.nets.initial_weights import initialise
from trimaran.nets.network import Network, network_of, open_network

CONFIG_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """A network on the meta device, a reader of its parameters and `buffers` on disk, and config.json's usual dtype."""

    network: Network
    read: Callable[[str], Tensor]
    dtype: str
    buffers: frozenset[str] = frozenset()


def open_base_weights(section: ModelSection, seed: int, stack: ExitStack) -> BaseWeights:
    """Return the weights of the model in `section`. Random ones, from `seed`, are drawn now and are all in memory."""
    folder = model_folder(section.path) if section.path else None
    files = open_weights(folder, stack) if folder and weight_files(folder) else {}
    counts = Counter(str(file.get_slice(name).get_dtype()) for name, file in files.items())
    dtype = CONFIG_DTYPES.get(counts.most_common(1)[0][0] if counts else "F32", "float32")
    if section.kind.is_hf:
        return _open_hf(section, seed, files, dtype)
    network, _ = open_network(section)
    for layer in (each for each in network.module.modules() if isinstance(each, MoeLayer)):
        if layer.correction_bias is not None:  # buffers are read at once, parameters when they are needed
            layer.correction_bias = torch.zeros(layer.spec.num_experts)
    if not files:
        assert network.spec is not None, "a network of ours has a spec"
        drawn = network_of(network.spec)
        initialise(drawn.module, seed=seed, spec=network.spec)
        return BaseWeights(network, lambda name: drawn.module.get_parameter(name).detach(), dtype)
    return BaseWeights(network, network.weight_reader(files), dtype, frozenset(correction_biases(network.module)))


def _open_hf(section: ModelSection, seed: int, files: dict[str, Any], dtype: str) -> BaseWeights:
    from trimaran.nets.hf.hf_build import WeightSource, find_weight_sources  # noqa: PLC0415  transformers takes seconds

    assert section.path is not None, "a section without a path has no spec to plan with"
    network, fill = open_network(section, seed=seed)
    module = network.module
    if not files or not all(each.is_meta for each in module.parameters()):
        fill(torch.device("cpu"))
        named = dict(module.named_parameters(remove_duplicate=False))
        return BaseWeights(network, lambda name: named[name].detach(), dtype)
    sources, _ = find_weight_sources(module, model_folder(section.path))
    targets: dict[str, WeightSource] = {source.target: source for source in sources}
    for source in sources:
        if source.converter is not None:
            shapes = {name: files[name].get_slice(name).get_shape() for name, _ in source.tensors}
            empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
            targets |= {target: source for target, _ in source.convert(module, empty)}
    # The name that is on disk for each other name of a tied parameter.
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    groups = ((group, next((each for each in group if each in targets), None)) for group in names.values())
    aliases = {name: found for group, found in groups if found is not None for name in group}

    def read(name: str) -> Tensor:
        target = aliases.get(name, name)
        source = targets[target]
        if source.converter is None:
            return files[source.name].get_tensor(source.name)
        values = {each: files[each].get_tensor(each) for each, _ in source.tensors}
        return dict(source.convert(module, values))[target]

    buffers = frozenset(name for name, _ in module.named_buffers() if name in targets)
    return BaseWeights(network, read, dtype, buffers)
