"""Several adapters over one base at once: each token of a batch uses that of its own sequence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.core import UserError
from trimaran.nets.adapters.lora_linear import LoraLinear, remove_adapter
from trimaran.nets.decoder.latent_attention import LatentAttention
from trimaran.nets.local_shards import is_sharded_by_inputs, local_part
from trimaran.nets.network import Network


@dataclass(frozen=True, slots=True, eq=False)
class AdapterUpdate:
    """A linear layer's update, of this rank's slices: `scaling * up @ down`; `factor` [out] rescales the sum (DoRA)."""

    down: Tensor
    up: Tensor
    scaling: float
    factor: Tensor | None


TokenGroup = tuple[int, Tensor | None]  # a number of an adapter, and the tokens of a row that use it: None if all do


class AdapterBank:
    """Adapters of a network that stay unmerged, numbered from 1. A hook adds their updates to each linear layer.

    `use` says which tokens of the next forward use which. The layers keep their class and their names.
    """

    def __init__(self, network: Network, head: nn.Module | None) -> None:
        self._network, self._head = network, head
        self.names: list[str] = []
        self._updates: dict[nn.Module, dict[int, AdapterUpdate]] = {}
        self._adapters: Sequence[int] = ()  # of each sequence of the next forward; none if no sequence has one
        self._groups: Sequence[TokenGroup] = ()
        self._head_groups: Sequence[TokenGroup] = ()

    @torch.no_grad()
    def take(self, name: str) -> None:
        """Move the attached and filled adapter from the network into the bank under this name.

        Every rank that shards the network must call it. Raises if the adapter also trains modules in full, or image
        towers: these exist once for all sequences.
        """
        layers = {path: each for path, each in self._network.module.named_modules() if isinstance(each, LoraLinear)}
        adapted = {id(each) for layer in layers.values() for each in layer.parameters()}
        named = self._network.module.named_parameters()
        full = [path for path, each in named if each.requires_grad and id(each) not in adapted]
        language = [*self._network.towers.values()][-1]
        outside = [path for path in layers if not path.startswith(language) and layers[path] is not self._head]
        refuse_shared_parts(name, full, outside)
        if name in self.names:
            number = self.names.index(name) + 1
            for updates in self._updates.values():
                updates.pop(number, None)
        else:
            self.names.append(name)
            number = len(self.names)
        for layer in layers.values():
            if layer not in self._updates:
                self._updates[layer] = {}
                # Of a layer that is sharded by its inputs the output has no bias yet, and is summed over ranks by the
                # next hook: an update is a part of that sum.
                has_bias = layer.bias is not None and not is_sharded_by_inputs(layer)
                layer.register_forward_hook(partial(self._add_updates, self._updates[layer], has_bias), prepend=True)
            factor = None if layer.lora_magnitude is None else local_part(layer.lora_magnitude / layer.weight_norms())
            matrices = local_part(layer.lora_A), local_part(layer.lora_B)
            self._updates[layer][number] = AdapterUpdate(*matrices, layer.scaling, factor)
            remove_adapter(layer)
        for attention in self._network.module.modules():
            if isinstance(attention, LatentAttention) and attention.kv_b_proj in self._updates:
                updates = self._updates[attention.kv_b_proj]
                attention.weights_of_sequences = partial(self._weights_of_sequences, updates)

    def discard(self) -> None:
        """Remove an adapter that is attached to the network and was not taken."""
        for layer in list(self._network.module.modules()):
            if isinstance(layer, LoraLinear):
                remove_adapter(layer)

    def use(self, adapters: np.ndarray, query_lengths: np.ndarray, kept: np.ndarray, device: torch.device) -> None:
        """Use `adapters` [S], 0 for none, in the next forward of sequences of these lengths; it keeps `kept` tokens."""
        if not adapters.any():
            self._adapters = self._groups = self._head_groups = ()
            return
        self._adapters = adapters.tolist()
        of_tokens = np.repeat(adapters, query_lengths)
        self._groups = _groups(of_tokens, device)
        self._head_groups = _groups(of_tokens[kept], device)

    def _weights_of_sequences(
        self, updates: Mapping[int, AdapterUpdate], weight: Tensor, num_sequences: int
    ) -> Sequence[Tensor]:
        """Return the weight of a layer without a bias for each sequence, with its update, in the weight's dtype."""
        if not self._adapters:
            return [weight] * num_sequences
        changed = {}
        for number in {*self._adapters} & {*updates}:
            update = updates[number]
            with torch.autocast(weight.device.type, enabled=False):
                found = weight.float() + update.scaling * (update.up.float() @ update.down.float())
            found = found if update.factor is None else update.factor.float()[:, None] * found
            changed[number] = found.to(weight.dtype)
        return [changed.get(number, weight) for number in self._adapters]

    def _add_updates(
        self, updates: Mapping[int, AdapterUpdate], has_bias: bool, layer: nn.Linear, args: tuple[Any, ...], out: Tensor
    ) -> Tensor | None:
        """Return a layer's output with the updates of its tokens; None, for no change, if no token has one."""
        used = self._head_groups if layer is self._head else self._groups
        groups = [(updates[number], rows) for number, rows in used if number in updates]
        if not groups:
            return None
        x, flat = args[0].flatten(0, -2), out.flatten(0, -2)
        bias = local_part(layer.bias) if has_bias else None
        for update, rows in groups:
            if rows is None:
                flat = _updated(x, flat, update, bias)
            else:
                flat[rows] = _updated(x[rows], flat[rows], update, bias)
        return flat.view_as(out)


def refuse_shared_parts(name: str, full: Sequence[str], outside: Sequence[str]) -> None:
    """Raise UserError if an adapter trains the parameters `full`, or changes linear layers `outside` the text model."""
    if full or outside:
        what = f"trains {full[0]} in full" if full else f"changes {outside[0]}, which all sequences share"
        raise UserError("E009.adapter", where="adapters", name=name, text=what)


def _updated(x: Tensor, base: Tensor, update: AdapterUpdate, bias: Tensor | None) -> Tensor:
    """Return the output of a linear layer with an update, given its input and its own output. See `LoraLinear`."""
    low = F.linear(x, update.down.to(x.dtype)) * update.scaling
    added = F.linear(low, update.up.to(low.dtype)).to(base.dtype)
    if update.factor is None:
        return base + added
    factor = update.factor.to(base.dtype)
    if bias is None:
        return factor * (base + added)
    bias = bias.to(base.dtype)
    return factor * (base - bias + added) + bias


def _groups(of_tokens: np.ndarray, device: torch.device) -> list[TokenGroup]:
    numbers = np.unique(of_tokens)
    if len(numbers) == 1:
        return [(int(numbers[0]), None)] if numbers[0] else []
    rows = {int(each): torch.from_numpy(np.flatnonzero(of_tokens == each)).to(device) for each in numbers if each}
    return [*rows.items()]
