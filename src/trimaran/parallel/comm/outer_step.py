"""Replicas that train alone for some steps, and exchange their outer gradients: the formats, and the outer step."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimaran.core import Plan
from trimaran.core.replica_sync import INT8_BLOCK, SPARSE_BLOCK, SPARSE_LEVEL_BYTES, LocalSteps, synchronisation_bytes
from trimaran.core.traits import DEVICE_TRAITS
from trimaran.nets import Network, local_part
from trimaran.parallel.comm.gradient_exchange import gather_single, int8_message, read_int8
from trimaran.parallel.mesh import RankMesh
from trimaran.runs.gloo_listeners import closed_listeners


class Bf16Codec:
    """Turns rows of fp32 values [rows, n] into rows of bytes and back, rounded to bf16; n is a multiple of `block`."""

    block = 1

    def encode(self, values: Tensor) -> Tensor:
        return values.to(torch.bfloat16).view(torch.uint8)

    def decode(self, encoded: Tensor) -> Tensor:
        return encoded.view(torch.bfloat16).float()


class Int8Codec:
    """The same, rounded to the nearest of 255 levels between plus and minus the largest magnitude of each block."""

    block = INT8_BLOCK

    def encode(self, values: Tensor) -> Tensor:
        return int8_message(values.view(len(values), -1, INT8_BLOCK), noise=0.5)

    def decode(self, encoded: Tensor) -> Tensor:
        return read_int8(encoded, INT8_BLOCK)


class SparseCodec:
    """Keeps the `kept` largest magnitudes of each block, each as one of two magnitudes and a sign: 2 bits.

    The two magnitudes of a block are the means of the kept values above and below their mean. Rows are blocks.
    """

    block = SPARSE_BLOCK

    def __init__(self, kept: int) -> None:
        assert kept % 4 == 0, "four levels are a byte"
        self._kept = kept

    def encode(self, values: Tensor) -> Tensor:
        indices = values.abs().topk(self._kept, dim=1).indices
        kept = values.gather(1, indices)
        magnitudes = kept.abs()
        is_large = magnitudes > magnitudes.mean(1, keepdim=True)
        levels = torch.stack([_masked_mean(magnitudes, ~is_large), _masked_mean(magnitudes, is_large)], 1)
        codes = is_large.to(torch.uint8) + 2 * (kept < 0).to(torch.uint8)
        packed = codes[:, 0::4] | codes[:, 1::4] << 2 | codes[:, 2::4] << 4 | codes[:, 3::4] << 6
        first, second = indices[:, 0::2], indices[:, 1::2]  # pairs of numbers below 4096 are three bytes
        places = torch.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], 2).flatten(1)
        return torch.cat([places.to(torch.uint8), packed, levels.view(torch.uint8)], 1)

    def decode(self, encoded: Tensor) -> Tensor:
        parts = encoded.split([self._kept // 2 * 3, self._kept // 4, SPARSE_LEVEL_BYTES], 1)
        packed, levels = parts[1], parts[2].clone().view(torch.float32)  # aligned
        codes = torch.stack([packed & 3, packed >> 2 & 3, packed >> 4 & 3, packed >> 6], 2).flatten(1).long()
        values = levels.gather(1, codes & 1) * (1 - (codes & 2)).float()
        dense = torch.zeros(len(encoded), SPARSE_BLOCK, device=encoded.device)
        high, middle, low = parts[0].long().view(len(encoded), -1, 3).unbind(2)
        places = torch.stack([high << 4 | middle >> 4, (middle & 15) << 8 | low], 2).flatten(1)
        return dense.scatter_(1, places, values)


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each row over `mask`; 0 where the mask is empty."""
    return torch.where(mask, values, 0.0).sum(1) / mask.sum(1).clamp(min=1)


class MeanExchange:
    """A mean over replicas that all call the same methods; `sent` is what others receive of a sparse exchange."""

    sent: Tensor

    def advance(self) -> None:
        """Wait for the first of two collectives and start the second. It may be left out: `finish` does it too."""

    def finish(self) -> Tensor:
        """Return the mean in fp32, bitwise equal on all replicas."""
        raise NotImplementedError


StartExchange = Callable[[Tensor], MeanExchange]
"""Starts to exchange a flat fp32 tensor, which belongs to the exchange from then on."""


def exchange_of(local: LocalSteps, group: dist.ProcessGroup) -> StartExchange:
    if local.compression == "sparse":
        codec = SparseCodec(local.kept_per_block)
        return lambda values: SparseMean(values, codec, group)
    if local.compression == "none" or group.size() == 1:
        return lambda values: AllReducedMean(values, group)
    quantiser = Bf16Codec() if local.compression == "bf16" else Int8Codec()
    return lambda values: QuantisedMean(values, quantiser, group)


class AllReducedMean(MeanExchange):
    """An all-reduce in fp32."""

    def __init__(self, values: Tensor, group: dist.ProcessGroup) -> None:
        self.sent = values
        self._mean = values.div_(group.size())  # divided first, as torch's averager does
        self._work = dist.all_reduce(self._mean, group=group, async_op=True) if group.size() > 1 else None

    def finish(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._mean


class QuantisedMean(MeanExchange):
    """Each replica sums one part of the values: it receives this part of all, and sends the sum to all, encoded.

    Values are decoded before they are summed, in the order of the replicas. They are rounded twice.
    """

    def __init__(self, values: Tensor, codec: Bf16Codec | Int8Codec, group: dist.ProcessGroup) -> None:
        self.sent, self._codec, self._group, self._size = values, codec, group, len(values)
        parts = group.size()
        padded = torch.nn.functional.pad(values, (0, -len(values) % (parts * codec.block)))
        self._encoded = codec.encode(padded.view(parts, -1)).contiguous()
        self._received, self._gathered = torch.empty_like(self._encoded), torch.empty_like(self._encoded)
        self._work: Any = dist.all_to_all_single(self._received, self._encoded, group=group, async_op=True)
        self._is_gathering = False

    def advance(self) -> None:
        if self._is_gathering:
            return
        self._work.wait()
        mean = self._codec.decode(self._received).sum(0, keepdim=True).div_(self._group.size())
        self._encoded = self._codec.encode(mean).contiguous()
        self._work = gather_single(self._gathered.view(-1), self._encoded.view(-1), group=self._group, async_op=True)
        self._is_gathering = True

    def finish(self) -> Tensor:
        self.advance()
        self._work.wait()
        return self._codec.decode(self._gathered).flatten()[: self._size]


class SparseMean(MeanExchange):
    """The largest values of each block, all-gathered and added up in the order of the replicas."""

    def __init__(self, values: Tensor, codec: SparseCodec, group: dist.ProcessGroup) -> None:
        self._codec, self._group, self._size = codec, group, len(values)
        blocks = torch.nn.functional.pad(values, (0, -len(values) % codec.block)).view(-1, codec.block)
        encoded = codec.encode(blocks)
        self.sent = codec.decode(encoded).flatten()[: self._size]
        self._encoded, self._work = encoded, None
        if group.size() > 1:
            self._gathered = encoded.new_empty(group.size(), *encoded.shape)
            self._work = gather_single(self._gathered.view(-1), encoded.view(-1), group=group, async_op=True)

    def finish(self) -> Tensor:
        if self._work is None:
            return self.sent.clone()
        self._work.wait()
        total = self._codec.decode(self._gathered[0])
        for each in self._gathered[1:]:
            total += self._codec.decode(each)
        return total.flatten()[: self._size].div_(self._group.size())


MAX_BUCKET_VALUES = 64 << 20  # 256 MiB of fp32: exchanged together
NamedParameter = tuple[str, nn.Parameter]


class OuterTensor(NamedTuple):
    """A part of the outer state, shaped as its parameter here: synchronised `weights`, `momentum` or unsent `error`."""

    kind: str
    name: str
    parameter: nn.Parameter
    tensor: Tensor


class BucketExchange(NamedTuple):
    """A bucket's exchange on its way. `error` is what it does not send, for the error feedback of a sparse one."""

    mean: MeanExchange
    error: Tensor | None = None


class OuterBucket:
    """Parameters that are exchanged together, and their outer state: flat tensors in fp32, on one device."""

    def __init__(self, named: Sequence[NamedParameter], local: LocalSteps, device: torch.device) -> None:
        self.named, self._local, self._device = [*named], local, device
        self.sizes = [local_part(each).numel() for _, each in named]
        self.num_values = sum(self.sizes)
        self._state: dict[str, Tensor] = {}
        state_device = torch.device("cpu") if local.outer.offload else device
        if local.keeps_outer_weights:
            self._state["weights"] = self.local_weights().to(state_device)
            kinds = ["momentum"] if local.outer.resolved_momentum else []
            for kind in [*kinds, "error"] if local.compression == "sparse" else kinds:
                self._state[kind] = torch.zeros(self.num_values, device=state_device)

    def tensors(self) -> Iterator[OuterTensor]:
        for kind, flat in self._state.items():
            for (name, parameter), part in zip(self.named, flat.split(self.sizes), strict=True):
                yield OuterTensor(kind, name, parameter, part.view(local_part(parameter).shape))

    def local_weights(self) -> Tensor:
        """Return a copy of this replica's weights, flat, in fp32, on the device that communicates."""
        parts = [local_part(each).reshape(-1).to(self._device, torch.float32) for _, each in self.named]
        return torch.cat(parts)

    def start(self, start: StartExchange) -> BucketExchange:
        """Start to exchange the outer gradient, or the weights themselves for a plain average. No state changes."""
        values = self.local_weights()
        if not self._local.keeps_outer_weights:
            return BucketExchange(start(values))
        outer_gradient = torch.sub(self._state["weights"].to(self._device), values, out=values)
        if (error := self._state.get("error")) is None:
            return BucketExchange(start(outer_gradient))
        total = outer_gradient.add_(error.to(self._device), alpha=self._local.error_decay)
        mean = start(total)
        return BucketExchange(mean, total.sub_(mean.sent))

    def finish(self, exchange: BucketExchange, mixing: float) -> None:
        """Wait for the mean of the replicas, and `take` it."""
        self.take(exchange.mean.finish(), exchange.error, mixing)

    def take(self, mean: Tensor, error: Tensor | None = None, mixing: float = 0.0) -> None:
        """Update the outer state from the mean of the replicas, and the weights: `mixing` parts of them stay local."""
        if error is not None:
            self._state["error"].copy_(error)
        if self._local.keeps_outer_weights:  # a step of the outer optimizer, which is torch's SGD
            outer, weights = self._local.outer, self._state["weights"]
            mean = mean.to(weights.device)
            if (momentum := self._state.get("momentum")) is not None:
                momentum.mul_(outer.resolved_momentum).add_(mean)
                is_nesterov = outer.optimizer == "nesterov"
                mean = mean.add(momentum, alpha=outer.resolved_momentum) if is_nesterov else momentum
            mean = weights.add_(mean, alpha=-outer.resolved_lr)
        for (_, parameter), part in zip(self.named, mean.split(self.sizes), strict=True):
            weights = local_part(parameter)
            new = part.view(weights.shape).to(weights.device)
            weights.copy_(new.lerp(weights.float(), mixing) if mixing else new)


class OuterState(Protocol):
    """What a checkpoint holds of replicas that train alone. `replica` says under which keys."""

    @property
    def replica(self) -> int: ...

    @property
    def local(self) -> LocalSteps: ...

    def tensors(self) -> Iterator[OuterTensor]:
        """Yield the outer state that checkpoints hold. The tensors never move."""
        ...

    def restore(self, loaded: Callable[[OuterTensor], bool]) -> None:
        """Start over what no checkpoint had. Weights and state are filled; `loaded` says which of the state."""
        ...


class OuterStep:
    """Synchronises the replicas' weights after the updates at which the plan says so; every rank calls all methods.

    An exchange on its way belongs to one fragment: a list of buckets. Nothing is on its way after a step that is a
    multiple of `LocalSteps.steps`. After `last_step` all replicas have the same weights.
    """

    def __init__(
        self,
        local: LocalSteps,
        fragments: Sequence[Sequence[OuterBucket]],
        group: dist.ProcessGroup,
        *,
        last_step: int,
        device: torch.device,
        ranks_of_replica: dist.ProcessGroup | None = None,
    ) -> None:
        self.ranks_of_replica = ranks_of_replica  # None if a replica is one rank
        self.local, self.replica, self.fragments = local, group.rank(), fragments
        self._start, self._num_replicas = exchange_of(local, group), group.size()
        self._last_step, self._device = last_step, device
        self._running: dict[int, list[BucketExchange]] = {}

    def tensors(self) -> Iterator[OuterTensor]:
        """Yield the outer state that checkpoints hold. The tensors never move."""
        return (each for fragment in self.fragments for bucket in fragment for each in bucket.tensors())

    @torch.no_grad()
    def restore(self, loaded: Callable[[OuterTensor], bool]) -> None:
        """Forget what is on its way; after the weights are filled, start over all state that was not `loaded`."""
        for exchange in (each for exchanges in self._running.values() for each in exchanges):
            exchange.mean.finish()
        self._running = {}
        start_over(each for each in self.tensors() if not loaded(each))

    @torch.no_grad()
    def after_update(self, step: int) -> Callable[[], dict[str, Any]]:
        """Synchronise what is due after `step` steps of the run; return a reader of its metrics, to call a step later.

        A fragment whose exchange was not started in time, right after a resume, is exchanged at once.
        """
        local, is_last = self.local, step == self._last_step
        due = [*range(local.fragments)] if is_last else local.fragments_due(step)
        timer = ExchangeTimer(self._device) if due else None
        for number in due:
            self._synchronise(number, mixing=local.mixing if local.overlap_steps and not is_last else 0.0)
        if timer is not None:
            timer.stop()
        if local.overlap_steps:
            # Start the exchanges that are used `overlap_steps` from now; continue those that are half-way.
            for number in local.fragments_due(step + local.overlap_steps):
                if step + local.overlap_steps < self._last_step:  # at the last step everything is exchanged
                    self._running[number] = [bucket.start(self._start) for bucket in self.fragments[number]]
            half = local.overlap_steps // 2
            for number in local.fragments_due(step + half) if half else ():
                for exchange in self._running.get(number, ()):
                    exchange.mean.advance()
        if timer is None:
            return dict
        num_values = sum(bucket.num_values for number in due for bucket in self.fragments[number])
        num_bytes = round(synchronisation_bytes(local, num_values, self._num_replicas))
        return lambda: {"outer": {"bytes": num_bytes, "seconds": timer.seconds(), "fragments": due}}

    def _synchronise(self, number: int, *, mixing: float) -> None:
        """Finish the exchange of a fragment. If none is running, exchange it now, two buckets at a time."""
        buckets = self.fragments[number]
        if (running := self._running.pop(number, None)) is not None:
            for bucket, exchange in zip(buckets, running, strict=True):
                bucket.finish(exchange, mixing)
            return
        before: tuple[OuterBucket, BucketExchange] | None = None
        for bucket in buckets:
            exchange = bucket.start(self._start)
            if before is not None:
                before[0].finish(before[1], mixing)
            before = bucket, exchange
        if before is not None:
            before[0].finish(before[1], mixing)


def start_over(tensors: Iterable[OuterTensor]) -> None:
    """Set outer state that no checkpoint had: from the weights, which are filled."""
    for each in tensors:
        each.tensor.zero_() if each.kind != "weights" else each.tensor.copy_(local_part(each.parameter))


class ExchangeTimer:
    """Measures the seconds until `stop`, on the device if it is a GPU. `seconds` waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self._on_gpu = DEVICE_TRAITS[device.type].runs_async
        self.stop()

    def stop(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> float:
        if not self._on_gpu:
            return self._times[1] - self._times[0]
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1000


def build_outer_step(plan: Plan, ranks: RankMesh, networks: Sequence[Network], *, last_step: int) -> OuterStep | None:
    """Return this rank's outer step, collectively, as it may need groups; None if replicas synchronise gradients."""
    local = plan.comm.local
    trained = [each for network in networks for each in network.module.parameters() if each.requires_grad]
    if not local.is_on or any(each.is_meta for each in trained):
        return None
    group = _groups_across(ranks, inside=False) if local.overlap_steps else ranks.group("dp_replicate")
    fragments = split_fragments(networks, local.fragments, separate=plan.mesh.pp > 1)
    buckets = [[OuterBucket(named, local, ranks.device) for named in each] for each in fragments]
    inside = _groups_across(ranks, inside=True) if ranks.degrees.world_size > ranks.degrees.dp_replicate else None
    return OuterStep(local, buckets, group, last_step=last_step, device=ranks.device, ranks_of_replica=inside)


def _groups_across(ranks: RankMesh, *, inside: bool) -> dist.ProcessGroup:
    """Create process groups of the ranks inside each replica, or of those that hold the same part of each replica.

    Returns the group of this rank. Other collectives of the same ranks would wait behind an exchange that overlaps
    training, so it gets groups of its own.
    """
    names = ranks.axes.mesh_dim_names
    assert names is not None
    table = ranks.axes.mesh.movedim(names.index("dp_replicate"), 0).reshape(ranks.degrees.dp_replicate, -1)
    with closed_listeners():
        group, _ = dist.new_subgroups_by_enumeration((table if inside else table.T).tolist())
    assert isinstance(group, dist.ProcessGroup), "every rank is in one of them"
    return group


def split_fragments(
    networks: Sequence[Network], num_fragments: int, *, separate: bool
) -> list[list[list[NamedParameter]]]:
    """Return the trained parameters of this rank by fragment and bucket, the same on every replica.

    Blocks go to the smallest fragment so far, in order; what is outside of blocks is in the last fragment. `separate`:
    it gets a bucket for each parameter, so that both copies of a tied embedding are summed in the same order.
    """
    fragments: list[list[list[NamedParameter]]] = [[] for _ in range(num_fragments)]
    sizes = [0] * num_fragments
    blocks: list[list[NamedParameter]] = []
    for network in networks:
        trained = [(name, each) for name, each in network.module.named_parameters() if each.requires_grad]
        owners = {id(each): number for number, block in enumerate(network.blocks) for each in block.parameters()}
        rest = [named for named in trained if id(named[1]) not in owners and local_part(named[1]).numel()]
        fragments[-1] += [[named] for named in rest] if separate else _joined(rest)
        sizes[-1] += sum(each.numel() for _, each in rest)
        in_blocks = [[named for named in trained if owners.get(id(named[1])) == number] for number in
                     range(len(network.blocks))]  # fmt: skip
        blocks += [each for each in in_blocks if each]
    members: list[list[NamedParameter]] = [[] for _ in range(num_fragments)]
    for block in blocks:
        smallest = sizes.index(min(sizes))
        members[smallest] += block
        sizes[smallest] += sum(each.numel() for _, each in block)
    return [[*outside, *_joined(inside)] for outside, inside in zip(fragments, members, strict=True)]


def _joined(named: Sequence[NamedParameter]) -> list[list[NamedParameter]]:
    """Return the parameters in buckets of at most `MAX_BUCKET_VALUES`, unless one has more. No bucket is empty."""
    buckets: list[list[NamedParameter]] = []
    size = 0
    for each in named:
        num_values = local_part(each[1]).numel()
        if not num_values:
            continue
        if not buckets or size + num_values > MAX_BUCKET_VALUES:
            buckets.append([])
            size = 0
        buckets[-1].append(each)
        size += num_values
    return buckets
