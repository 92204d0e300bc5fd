"""Norms of gradients and updates by group of modules (layers, embedding, norm, head), for any sharding."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimaran.core import Plan
from trimaran.nets import Network, local_part
from trimaran.parallel import (
    NO_SPLIT_WEIGHTS,
    GradientSquares,
    RankMesh,
    SplitWeights,
    TrainedParameters,
    all_gather_json,
    join_fp32,
    map_stages,
    store_of,
)
from trimaran.parallel.tensor_sums import group_masks, has_kernels, num_shards, sum_by_mask, to_device
from trimaran.train.metrics.router_stats import copy_to_host_async

MIN_SAMPLED_VALUES = 2**10  # of a large tensor, enough to estimate the norm of its update
MAX_SAMPLED_VALUES = 2 * MIN_SAMPLED_VALUES
Sample = Callable[[], Tensor]
Groups = Mapping[str, Sequence[nn.Parameter]]
MAX_GROUPS = 64  # in a metrics line
OTHER_GROUP = "other"


class SampledWeights:
    """Reads sampled values of some parameters, which may be sharded, or split in two halves. No shard is empty."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], device: torch.device, split: SplitWeights = NO_SPLIT_WEIGHTS
    ) -> None:
        self._parameters, self._device = parameters, device
        self._halves = [split.lower_halves.get(each) for each in parameters]
        self.sizes: list[int] = []  # the number of values of each parameter
        for part, low in zip(map(local_part, parameters), self._halves, strict=True):
            on_disk = _is_on_disk(part, low)
            self.sizes.append(min(part.numel(), MAX_SAMPLED_VALUES) if on_disk else sample_values(part).numel())
        self._addresses: list[int] = []
        self._launches: list[tuple[Tensor, torch.dtype, bool]] = []
        self._plain: list[Sample] = []
        self._split: list[tuple[Sample, Sample]] = []
        self._places = torch.empty(0, dtype=torch.int64, device=device)

    def read(self) -> Tensor:
        """Return the values in fp32 [parameters, MAX_SAMPLED_VALUES], padded with zeros."""
        parts = [local_part(each) for each in self._parameters]
        addresses = [0 if each is None else each.data_ptr() for each in (*parts, *self._halves)]
        if addresses != self._addresses:  # FSDP moves tensors at the first steps
            self._prepare(parts)
            self._addresses = addresses
        samples = torch.zeros(len(parts), MAX_SAMPLED_VALUES, device=self._device)
        if self._launches:
            from trimaran.parallel.kernels.tensor_sums import DTYPES, gather_samples  # noqa: PLC0415  needs Triton

            for table, dtype, has_low in self._launches:
                run, width = gather_samples[(len(table),)], MAX_SAMPLED_VALUES
                run(table, samples, DTYPE=DTYPES[dtype], HAS_LOW=has_low, WIDTH=width)
        if len(self._places):
            plain = [each() for each in self._plain]
            upper, lower = ([each[half]() for each in self._split] for half in (0, 1))
            joined = [join_fp32(torch.cat(upper), torch.cat(lower))] if upper else []
            samples.view(-1).index_copy_(0, self._places, torch.cat([*plain, *joined]).float())
        return samples

    def _prepare(self, parts: Sequence[Tensor]) -> None:
        rows: dict[tuple[torch.dtype, bool], list[list[int]]] = {}
        plain, split = [], []
        for number, (part, low) in enumerate(zip(parts, self._halves, strict=True)):
            if _is_on_disk(part, low):
                first = [partial(_first_values, each, self._device) for each in (part, low) if each is not None]
                plain += [(number, first[0])] if low is None else []
                split += [] if low is None else [(number, (first[0], first[1]))]
            elif has_kernels(part.device.type) and part.is_contiguous() and (low is None or low.is_contiguous()):
                row = [part.data_ptr(), 0 if low is None else low.data_ptr(), _stride(part), self.sizes[number], number]
                rows.setdefault((part.dtype, low is not None), []).append(row)
            elif low is None:
                plain.append((number, _sample_of(part)))
            else:
                split.append((number, (_sample_of(part), _sample_of(low))))
        self._launches = [(to_device(torch.tensor(table), self._device), *kind) for kind, table in rows.items()]
        self._plain, self._split = [each for _, each in plain], [each for _, each in split]
        numbers = [number for number, _ in (*plain, *split)]
        ranges = [torch.arange(self.sizes[each]) + each * MAX_SAMPLED_VALUES for each in numbers]
        self._places = to_device(torch.cat([torch.empty(0, dtype=torch.int64), *ranges]), self._device)


def _is_on_disk(part: Tensor, low: Tensor | None) -> bool:
    return any(each is not None and store_of(each) is not None for each in (part, low))


def _first_values(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the first values, of a page or two: values spread over a file would need a read each."""
    return tensor.reshape(-1)[:MAX_SAMPLED_VALUES].to(device)


def _sample_of(tensor: Tensor) -> Sample:
    if tensor.is_contiguous():
        view = sample_values(tensor)
        return lambda: view
    return lambda: sample_values(tensor)


def sample_values(tensor: Tensor) -> Tensor:
    """Return at most MAX_SAMPLED_VALUES values spread evenly over a tensor, flat; a view, if it is contiguous."""
    if tensor.is_contiguous():
        return tensor.view(-1)[:: _stride(tensor)]
    stride = max(1, tensor.numel() // MIN_SAMPLED_VALUES)  # of complete rows, because a flat view does not exist
    rows = tensor[:: min(stride, len(tensor))].flatten()
    return rows[:: -(-len(rows) // MAX_SAMPLED_VALUES)]


def _stride(tensor: Tensor) -> int:
    """Return the stride of samples. It has no common factor with the row length, so all columns are sampled."""
    stride, width = max(1, tensor.numel() // MIN_SAMPLED_VALUES), tensor.shape[-1] if tensor.ndim else 1
    while math.gcd(stride, width) > 1:
        stride += 1
    return stride


@dataclass(frozen=True, slots=True)
class UpdateSnapshot:
    """Taken before an update: squared gradient norms by group, and sampled values of this rank's weights."""

    gradients: Tensor
    weights: Tensor


class GroupMeter:
    """Measures every `every`-th update, starting with the first; 0 measures none. All ranks have the same groups.

    The update is measured on the weights, before and after, so it works for any optimizer and any format of its states.
    It does not copy all weights: large tensors are sampled. Each of `pp` stages is on the same number of ranks, as
    replicas or shards. A rank without parameters puts its zeros on `device`.
    """

    def __init__(
        self, groups: Groups, split: SplitWeights = NO_SPLIT_WEIGHTS, *, every: int, pp: int, device: torch.device
    ) -> None:
        self._every, self._pp, self._num_updates, self._groups = every, pp, 0, groups
        self._split = split
        self._device = next((each.device for group in groups.values() for each in group), device)  # may be offloaded
        self._gradients: GradientSquares | None = None

    @torch.no_grad()
    def begin(self, gradients: GradientSquares | None = None) -> UpdateSnapshot | None:
        """Return a snapshot before an update that is to be measured; None if it is not.

        `gradients` are those of all parameters of the groups, measured already; without it they are measured here.
        """
        self._num_updates += 1
        if not self._every or (self._num_updates - 1) % self._every:
            return None
        if gradients is None:
            gradients = GradientSquares([*self._groups.values()], pp=self._pp, device=self._device)
            gradients.measure()
        if gradients is not self._gradients:
            self._gradients = gradients
            self._gradient_masks = group_masks([*self._groups.values()], gradients.parameters, self._device)
        sums = sum_by_mask(gradients.contributions, self._gradient_masks)
        return UpdateSnapshot(sums, self._sampled.read())

    @torch.no_grad()
    def end(self, before: UpdateSnapshot | None, scale: float) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the norms of the update. Call it one step later.

        Gradients were multiplied by the loss scale `scale`.
        """
        if before is None:
            return dict
        now = self._sampled.read()
        squares = torch.stack([now - before.weights, now]).square_().sum(-1, dtype=torch.float64)
        squares *= self._sample_factors
        table = [before.gradients, *(sum_by_mask(each, self._sample_masks) for each in squares)]
        sums, names = all_reduce_to_host_async(torch.stack(table)), [*self._groups]

        def read() -> dict[str, Any]:
            rows = zip(names, *sums().sqrt().tolist(), strict=True)
            return {
                "groups": {
                    name: {"grad_norm": gradient / scale, "update_ratio": move / weight if weight else 0.0}
                    for name, gradient, move, weight in rows
                }
            }

        return read

    @cached_property
    def _held(self) -> list[nn.Parameter]:
        """This rank's parameters. A rank's shard of a small parameter may be empty."""
        return [each for group in self._groups.values() for each in group if local_part(each).numel()]

    @cached_property
    def _sampled(self) -> SampledWeights:
        return SampledWeights(self._held, self._device, self._split)

    @cached_property
    def _sample_masks(self) -> Tensor:
        return group_masks([*self._groups.values()], self._held, self._device)

    @cached_property
    def _sample_factors(self) -> Tensor:
        """For each parameter the number of its values per sampled value, over the number of its replicas."""
        num_ranks = dist.get_world_size() // self._pp
        factors = [
            local_part(each).numel() / size * num_shards(each) / num_ranks
            for each, size in zip(self._held, self._sampled.sizes, strict=True)
        ]
        return torch.tensor(factors, dtype=torch.float64).to(self._device)


def all_reduce_to_host_async(table: Tensor) -> Callable[[], Tensor]:
    """Start an all-reduce of `table`; return a function that waits for it and returns the sum on the CPU."""
    work = dist.all_reduce(table, async_op=True) if dist.get_world_size() > 1 else None
    if table.is_cuda and work is not None:
        work.wait()  # makes the stream wait, not the host
    if table.is_cuda or work is None:
        return copy_to_host_async(table)

    def read() -> Tensor:
        work.wait()
        return table

    return read


def build_group_meter(
    networks: Sequence[Network],
    plan: Plan,
    ranks: RankMesh,
    trained: TrainedParameters,
    split: SplitWeights,
    *,
    every: int,
) -> GroupMeter | None:
    """Return a meter that measures every `every`-th update; None if `every` is 0. Every rank must call it."""
    if not every:
        return None
    stages = map_stages(plan, ranks)
    counted = {id(each) for each in trained.parameters}
    named = [
        (number, module_of(name), each)
        for number, network in zip(stages.here, networks, strict=True)
        for name, each in network.module.named_parameters()
        if id(each) in counted
    ]
    # All ranks have the same groups, some of them perhaps empty.
    modules = list(dict.fromkeys((number, module) for number, module, _ in named))
    if stages.group.size() > 1:
        modules = [(number, module) for pairs in all_gather_json(modules, stages.group) for number, module in pairs]
    group_of = merge_layers([module for _, module in sorted(modules, key=lambda each: each[0])])
    groups: dict[str, list[nn.Parameter]] = {group: [] for group in group_of.values()}
    for _, module, each in named:
        groups[group_of[module]].append(each)
    return GroupMeter(groups, split, every=every, pp=plan.mesh.pp, device=ranks.device)


def module_of(name: str) -> str:
    """Return the module of a parameter: the first one with a number (its layer), or else the one that holds it."""
    path = name.split(".")[:-1]
    numbered = next((depth for depth, part in enumerate(path) if part.isdigit()), len(path))
    return ".".join(path[: numbered + 1]) or name


def merge_layers(modules: Iterable[str], max_groups: int = MAX_GROUPS) -> dict[str, str]:
    """Return the group of each module, in order. If there are too many groups, neighbouring layers share one."""
    unique = list(dict.fromkeys(modules))
    layers: dict[str, list[int]] = {}
    for module in unique:
        stem, _, number = module.rpartition(".")
        if number.isdigit():
            layers.setdefault(stem, []).append(int(number))
    longest = max(map(len, layers.values()), default=1)
    for size in range(1, longest + 1):
        groups = {module: module for module in unique}
        for stem, numbers in layers.items():
            for start in range(0, len(numbers), size):
                merged = numbers[start : start + size]
                name = str(merged[0]) if len(merged) == 1 else f"{merged[0]}-{merged[-1]}"
                prefix = f"{stem}." if stem else ""
                groups |= {f"{prefix}{each}": f"{prefix}{name}" for each in merged}
        if len(set(groups.values())) <= max_groups:
            return groups
    roots = list(dict.fromkeys(module.split(".")[0] for module in unique))
    shown = set(roots if len(roots) <= max_groups else roots[: max_groups - 1])
    return {module: root if (root := module.split(".")[0]) in shown else OTHER_GROUP for module in unique}
