"""A frozen linear layer with a trained low-rank update, as in PEFT: LoRA, or DoRA with trained norms of the outputs."""

import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.core import AdapterSection
from trimaran.nets.local_shards import (
    forward_of_shard,
    gathered,
    is_dtensor,
    local_bias,
    local_for_compute,
    local_slices,
)

DOWN, UP, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude"
ADAPTER_PARAMETERS = (DOWN, UP, MAGNITUDE)


def is_adapter_parameter(name: str) -> bool:
    return name.rpartition(".")[2] in ADAPTER_PARAMETERS


def adapter_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield what is trained, by name: the adapter's parameters, and those of modules that are trained in full."""
    return ((name, each) for name, each in module.named_parameters() if each.requires_grad)


def adapter_scaling(section: AdapterSection) -> float:
    """Return the factor of the adapter's output."""
    return section.alpha / (math.sqrt(section.rank) if section.rank_stabilised else section.rank)


class LoraLinear(nn.Linear):
    """A frozen `nn.Linear` whose output has `scaling * lora_B @ lora_A @ x` added.

    With `lora_magnitude` (DoRA) the sum of both weights is rescaled: row i gets the norm `lora_magnitude[i]`.
    `add_adapter` makes one by changing the class of a linear layer, so that its name, hooks and references stay. A
    subclass with another format of the frozen weight overrides `base_forward` and `base_weight`.
    """

    lora_A: nn.Parameter  # noqa: N815 - PEFT's names
    lora_B: nn.Parameter  # noqa: N815
    lora_magnitude: nn.Parameter | None
    scaling: float
    dropout: float
    base_class: type[nn.Linear] = nn.Linear  # what the layer is without its adapter

    def base_forward(self, x: Tensor) -> Tensor:
        """Return the frozen layer's output, with its bias; under tensor parallelism that of this rank's shard."""
        return F.linear(x, local_for_compute(self.weight), local_bias(self))

    def base_weight(self) -> Tensor:
        """Return the frozen weight in a dtype that can be multiplied; a DTensor if it is sharded."""
        return self.weight

    def forward(self, input: Tensor) -> Tensor:
        """Return the output; under tensor parallelism this rank's columns, or its partial sum without the bias.

        A layer that every rank holds in full takes and returns a DTensor. Of a layer that is sharded by its outputs
        only lora_B is, of one that is sharded by its inputs only lora_A. The gradient of the other is a partial sum.
        """
        return forward_of_shard(self._local_forward, input)

    def _local_forward(self, x: Tensor, *, gradient_is_partial: bool) -> Tensor:
        base, local = self.base_forward(x), partial(local_for_compute, gradient_is_partial=gradient_is_partial)
        if self.training and self.dropout:
            if x.shape[-1] == self.in_features:
                x = F.dropout(x, self.dropout)
            else:  # tensor parallelism does not change which elements are dropped
                (_, columns) = local_slices(self.lora_A)
                whole = torch.ones(*x.shape[:-1], self.in_features, dtype=x.dtype, device=x.device)
                x = x * F.dropout(whole, self.dropout)[..., columns]
        low = F.linear(x, local(self.lora_A)) * self.scaling
        update = F.linear(low, local(self.lora_B))
        if self.lora_magnitude is None:
            return base + update
        # DoRA: scaled to the trained norms. The current norms have no gradient.
        factor = (local(self.lora_magnitude) / _local(self.weight_norms())).to(base.dtype)
        if (bias := local_bias(self)) is None:
            return factor * (base + update)
        bias = bias.to(base.dtype)
        return factor * (base - bias + update) + bias

    @torch.no_grad()
    def weight_norms(self) -> Tensor:
        """Return the norm of each row of the base weight with the update, fp32, sharded like `lora_magnitude`."""
        weight = self.base_weight()
        weight, down, up = (_local(each) for each in (weight, self.lora_A, self.lora_B))
        with torch.autocast(weight.device.type, enabled=False):  # without the updated matrix, or an fp32 copy of it
            base = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
            crossed = (up.float() * (weight @ down.to(weight.dtype).t()).float()).sum(1)
            down, up = down.float(), up.float()
            squares = base + 2 * self.scaling * crossed + self.scaling**2 * (up @ (down @ down.t()) * up).sum(1)
        if not is_dtensor(self.lora_magnitude):
            return squares.sqrt()
        from torch.distributed.tensor import DTensor, Partial, Shard  # noqa: PLC0415  see `is_dtensor`

        assert is_dtensor(self.lora_A)
        parts = (Partial(),) if self.lora_A.placements == (Shard(1),) else self.lora_magnitude.placements
        size = {"shape": self.lora_magnitude.shape, "stride": self.lora_magnitude.stride()}
        whole = DTensor.from_local(squares, self.lora_magnitude.device_mesh, parts, run_check=False, **size)
        return whole.redistribute(placements=self.lora_magnitude.placements).sqrt()


def add_adapter(linear: nn.Linear, section: AdapterSection, kind: type[LoraLinear] = LoraLinear) -> None:
    """Turn the layer into a `LoraLinear` in place, with fp32 parameters that are not yet filled."""
    out_features, in_features = linear.out_features, linear.in_features
    linear.__class__ = kind
    assert isinstance(linear, LoraLinear)
    device = linear.weight.device
    linear.lora_A = nn.Parameter(torch.empty(section.rank, in_features, dtype=torch.float32, device=device))
    linear.lora_B = nn.Parameter(torch.empty(out_features, section.rank, dtype=torch.float32, device=device))
    magnitude = torch.empty(out_features, dtype=torch.float32, device=device) if section.kind == "dora" else None
    linear.lora_magnitude = None if magnitude is None else nn.Parameter(magnitude)
    linear.scaling, linear.dropout = adapter_scaling(section), section.dropout


def merged_weight(linear: LoraLinear) -> Tensor:
    """Return the base weight with the adapter added, fp32 and unsharded. A collective if the layer is sharded."""
    tensors = (linear.base_weight(), linear.lora_A, linear.lora_B)
    weight, down, up = (gathered(each).detach().float() for each in tensors)
    magnitude = None if linear.lora_magnitude is None else gathered(linear.lora_magnitude).detach().float()
    return merge_adapter(weight, down, up, scaling=linear.scaling, magnitude=magnitude)


@torch.no_grad()
def merge_adapter(
    weight: Tensor, down: Tensor, up: Tensor, *, scaling: float, magnitude: Tensor | None = None
) -> Tensor:
    """Return `weight` with the update `scaling * up @ down`, and for DoRA the norms `magnitude`, in fp32."""
    merged = weight.float() + scaling * (up.float() @ down.float())
    if magnitude is None:
        return merged
    return merged * (magnitude.float() / torch.linalg.vector_norm(merged, dim=1)).unsqueeze(1)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor


@torch.no_grad()
def merge_in_place(module: nn.Module) -> None:
    """Turn every `LoraLinear` of an unsharded module into an `nn.Linear`, whose weight keeps its dtype."""
    for layer in list(module.modules()):
        if isinstance(layer, LoraLinear):
            layer.weight.copy_(merged_weight(layer))
            remove_adapter(layer)


def remove_adapter(layer: LoraLinear) -> None:
    for name in ADAPTER_PARAMETERS:
        delattr(layer, name)
    layer.__class__ = layer.base_class  # pyrefly: ignore[bad-argument-type]
