"""Splits weights into two 16-bit halves, accumulates their gradients in fp32, and reads and writes them as fp32."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor, nn

from trimaran.core import Plan
from trimaran.core.plan import RECOMPUTED_BY_OPERATOR
from trimaran.nets import Network
from trimaran.nets.attention import Attention, RMSNorm
from trimaran.nets.decoder import Decoder, DecoderLayer
from trimaran.nets.joint_projections import joint_slices
from trimaran.nets.moe import ExpertWeights, FeedForward, MoeLayer
from trimaran.nets.vision import Stem
from trimaran.optim.split_bf16 import join_fp32, split_fp32
from trimaran.parallel.memory.disk_store import DiskStore, goes_to_disk, padded
from trimaran.parallel.precision import own_dtype
from trimaran.parallel.tower_plan import recompute_of, tower_of_blocks

# Modules that autocast runs in 16 bits, so that nothing reads the weight in fp32. Embeddings are not among them: their
# rows are read as they are, and the many gradients of one row are better summed in fp32.
MATMUL_MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, ExpertWeights)
# Weights of such modules that are used in fp32 after all: a router computes in fp32, and a stem first sums its patch
# weights over frames.
FP32_MODULES: tuple[tuple[type[nn.Module], str], ...] = ((MoeLayer, "gate"), (Stem, "patch_embed"))
HALF_BYTES = 2
CHUNK_VALUES = 2**24  # values that are joined or split at once: bounds the temporary memory


def split_weights(networks: Sequence[Network], plan: Plan) -> dict[nn.Parameter, Tensor]:
    """Make some matrices their own bf16 upper half, in place, and return the int16 lower half of each.

    Call it after the weights are initialised and before anything computes with them. Projections are joined, if the
    plan says so. Returns nothing if the plan does not split weights. With more than one micro-batch a step, gradients
    are summed in fp32, as `main_grad`. A split parameter has a method `gather_full` that returns it in fp32, see
    `nets.hf_weights.full_tensor`.
    """
    lower_halves: dict[nn.Parameter, Tensor] = {}
    matrices = [each for network in networks for each in _matrices(network)]
    slices = join_projections(networks, plan, set(matrices))
    if not plan.splits_weights:
        for parameter, memory in slices.items():
            parameter.data = memory.copy_(parameter.detach())
        return lower_halves
    store = _store_of_halves(matrices, plan)
    for parameter in matrices:
        upper, lower = split_fp32(parameter.detach())
        if store is not None and goes_to_disk(lower.nbytes):
            lower = store.allocate(lower.shape, lower.dtype).copy_(lower)
            store.release()
        parameter.data = slices[parameter].copy_(upper) if parameter in slices else upper
        # A weak reference, since a parameter that refers to itself would outlive its network.
        _set_attributes(parameter, low=lower, gather_full=partial(_joined, ref(parameter)))
        if plan.grad_accum > 1:
            parameter.register_post_accumulate_grad_hook(_accumulate_in_fp32)
        lower_halves[parameter] = lower
    return lower_halves


def _store_of_halves(matrices: Sequence[Tensor], plan: Plan) -> DiskStore | None:
    """Return a file for the lower halves; None if they stay on the device."""
    if not plan.offloads_to_disk:
        return None
    sizes = [HALF_BYTES * each.numel() for each in matrices]
    return DiskStore(Path(plan.disk.path), sum(padded(size) for size in sizes if goes_to_disk(size)))


def split_weight_of(parameter: Tensor) -> "SplitWeight | None":
    """Return both halves of a parameter that `split_weights` has split; None for any other."""
    lower = getattr(parameter, "low", None)
    return None if lower is None else SplitWeight(parameter.detach(), lower)


def _joined(parameter: ref[nn.Parameter]) -> Tensor:
    held = parameter()
    assert held is not None, "the caller holds the parameter"
    split = split_weight_of(held)
    assert split is not None
    return split.joined()


@dataclass(frozen=True, slots=True)
class SplitWeight:
    """A view of an fp32 tensor that is stored as two halves; see `checkpoint.tensor_shards.TensorLike`."""

    upper: Tensor
    lower: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.upper.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def ndim(self) -> int:
        return self.upper.ndim

    @property
    def nbytes(self) -> int:
        return self.numel() * self.element_size()

    @property
    def is_cuda(self) -> bool:
        return self.upper.is_cuda

    def numel(self) -> int:
        return self.upper.numel()

    def element_size(self) -> int:
        return torch.float32.itemsize

    def __getitem__(self, window: Any, /) -> Self:
        return type(self)(self.upper[window], self.lower[window])

    @torch.no_grad()
    def copy_(self, values: Tensor) -> None:
        for upper, lower, chunk in _in_chunks(self.upper, self.lower, values):
            halves = split_fp32(chunk.to(upper.device, torch.float32))
            upper.copy_(halves[0])
            lower.copy_(halves[1])

    @torch.no_grad()
    def copy_to(self, target: Tensor, *, non_blocking: bool) -> None:
        for upper, lower, chunk in _in_chunks(self.upper, self.lower, target):
            chunk.copy_(join_fp32(upper, lower.to(upper.device)), non_blocking=non_blocking)  # may be on disk

    def joined(self) -> Tensor:
        """Return the fp32 values on the CPU."""
        values = torch.empty(self.shape, dtype=self.dtype)
        self.copy_to(values, non_blocking=False)
        return values


def _in_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same chunk of each of several tensors of one shape; full rows if any is not contiguous."""
    if all(each.is_contiguous() for each in tensors):
        return zip(*(each.view(-1).split(CHUNK_VALUES) for each in tensors), strict=True)
    rows = max(1, CHUNK_VALUES * len(tensors[0]) // max(1, tensors[0].numel()))
    return zip(*(each.split(rows) for each in tensors), strict=True)


def _matrices(network: Network) -> Iterator[nn.Parameter]:
    """Yield the weights to split: trained matrices that only 16-bit matmuls read.

    A module with its own dtype in the recipe may compute in fp32. A matrix that two modules share is also an embedding.
    """
    num_owners: dict[int, int] = {}
    for module in network.module.modules():
        for each in module.parameters(recurse=False):
            num_owners[id(each)] = num_owners.get(id(each), 0) + 1
    modules = list(network.module.modules())
    in_fp32 = {getattr(each, name) for each in modules for kind, name in FP32_MODULES if isinstance(each, kind)}
    for module in modules:
        if isinstance(module, MATMUL_MODULES) and own_dtype(module) is None and module not in in_fp32:
            for each in module.parameters(recurse=False):
                if each.ndim >= 2 and each.requires_grad and num_owners[id(each)] == 1:
                    yield each


def _accumulate_in_fp32(parameter: Tensor) -> None:
    """Add a micro-batch's gradient to `main_grad`, and free it before the next one is computed."""
    gradient, sums = parameter.grad, getattr(parameter, "main_grad", None)
    assert gradient is not None
    _set_attributes(parameter, main_grad=gradient.float() if sums is None else sums.add_(gradient))
    parameter.grad = None


def _set_attributes(parameter: Tensor, **attributes: object) -> None:
    for name, value in attributes.items():
        setattr(parameter, name, value)


def join_projections(networks: Sequence[Network], plan: Plan, matrices: Collection[Tensor]) -> dict[Tensor, Tensor]:
    """Let layers compute projections of the same input as one matmul; return the memory for their weights.

    `matrices` are the weights that may be joined. Each gets a slice of the joint weight, or its upper half does if
    weights are split. Towers with recompute by operator are left as they are.
    """
    on_cpu = all(each.device.type == "cpu" for each in matrices)
    if not (plan.joins_projections_on_cpu if on_cpu else plan.joins_projections):
        return {}
    dtype = torch.bfloat16 if plan.splits_weights else torch.float32
    slices: dict[Tensor, Tensor] = {}
    for decoder in (each for network in networks for each in network.module.modules() if isinstance(each, Decoder)):
        if type(decoder.norm) is RMSNorm:
            decoder.norm.fused = own_dtype(decoder.norm) is None and not has_hooks([decoder.norm])
    for layer in _decoder_layers(networks, plan):
        norms = layer.plain_norms
        layer.joint = bool(norms) and all(own_dtype(each) is None for each in layer.modules()) and not has_hooks(norms)
        for part in (each for each in layer.modules() if isinstance(each, Attention | FeedForward)):
            if layer.joint and part.projections and _may_be_joined(part, matrices):
                slices.update(joint_slices(part.projections, dtype))
                part.joint = True
        layer.fused = on_cpu and layer.is_fusible and all_joint(layer) and layer.self_attn.o_proj.weight in matrices
    return slices


def all_joint(layer: DecoderLayer) -> bool:
    """Return whether the whole layer may be fused: its projections and norms are joint, and no module has hooks."""
    is_joint = layer.joint and layer.self_attn.joint and isinstance(layer.mlp, FeedForward) and layer.mlp.joint
    return is_joint and not has_hooks(each for each in layer.modules() if each is not layer)


def _decoder_layers(networks: Sequence[Network], plan: Plan) -> Iterator[DecoderLayer]:
    for network in networks:
        for tower, block in tower_of_blocks(network):
            if isinstance(block, DecoderLayer) and recompute_of(tower, plan) not in RECOMPUTED_BY_OPERATOR:
                yield block


def _may_be_joined(part: Attention | FeedForward, matrices: Collection[Tensor]) -> bool:
    down = [part.down_proj] if isinstance(part, FeedForward) else []
    linears = (*part.projections, *down)
    weights = (getattr(each, "weight", None) for each in linears)  # 4-bit layers have none
    return all(each in matrices for each in weights) and not has_hooks(linears)


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Return whether one of the modules has hooks, which run only if the module itself is called."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(each, kind) for each in modules for kind in kinds)
