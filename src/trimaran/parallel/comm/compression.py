"""Compresses the gradients that FSDP2 reduces: the reduce-scatter over shards, and the all-reduce over replicas.

Each value is rounded once before it is sent to the rank that holds its shard, and summed there in fp32. Nothing is
summed in fewer bits, so that nothing overflows. Error feedback would need a residual of the whole gradient on each
rank, which is what sharding avoids.
"""

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from trimaran.core import Compression, LayerKind, Plan, UserError, data_axis
from trimaran.nets import Network, is_fsdp_module
from trimaran.parallel.comm.axis_waits import AXIS_WAITS
from trimaran.parallel.comm.gradient_exchange import (
    EXCHANGES,
    Exchange,
    ExchangeState,
    FeedbackTensors,
    Gradients,
    Shape,
    exchange_as,
    first_factor,
    int8_message,
    read_int8,
)
from trimaran.parallel.mesh import RankMesh

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SAMPLED_COLUMNS = 1024  # of each shard, to measure the error of the sum


class ShardCompressor:
    """The settings, the step, which random numbers depend on, and the measured error that FSDP units share."""

    def __init__(self, settings: Compression, shards: dist.ProcessGroup, replicas: dist.ProcessGroup | None) -> None:
        self.settings, self.state = settings, ExchangeState(settings, shards, shards.rank())
        self.outer = ExchangeState(settings, replicas, replicas.rank()) if replicas is not None else None
        self._squares: list[Tensor] = []  # of errors, and of exact sums
        self._calls: dict[str, int] = {}

    def begin_step(self, step: int, loss_scale: float = 1.0) -> None:
        """Say which step the next gradients are of. Nothing here depends on the loss scale."""
        self.state.step, self._squares, self._calls = step, [], {}

    def settle(self, refused: Tensor) -> None:
        """End a step. Nothing is remembered, whether it was refused or not."""
        self.state.step += 1

    def feedback(self) -> dict[str, FeedbackTensors]:
        """Return what is remembered between steps: nothing."""
        return {}

    @property
    def measures(self) -> bool:
        return bool(self.settings.check_every) and self.state.step % self.settings.check_every == 0

    @property
    def error(self) -> Tensor | None:
        """The relative error of the sums of this rank's shards in this step, if it was measured."""
        if not self._squares:
            return None
        difference, exact = torch.stack(self._squares).sum(0)
        return (difference / exact).sqrt()

    def add_error(self, result: Tensor, exact: Tensor) -> None:
        self._squares.append(torch.stack([(result - exact).square().sum(), exact.square().sum()]))

    def next_call(self, name: str) -> str:
        """Return a name for the next reduction of a unit in this step: each micro-batch may have one."""
        self._calls[name] = self._calls.get(name, 0) + 1
        return f"{name}/{self._calls[name]}"


class CompressedReduceScatter:
    """What FSDP2 calls in place of a reduce-scatter; see torch's `ReduceScatter`."""

    def __init__(self, compressor: ShardCompressor, name: str) -> None:
        self._compressor, self._name = compressor, name

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write the sum over the ranks of this rank's row of the input, or its mean, to the output."""
        ranks = group.size()
        rows = input_tensor.view(ranks, -1)
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise RuntimeError(f"compressed gradients are summed or averaged, not reduced by {op}")
        total = self._exchange(rows, group)
        if op == dist.ReduceOp.AVG:
            total /= ranks
        output_tensor.copy_(total)
        if self._compressor.measures:
            exact = rows[:, :SAMPLED_COLUMNS].float().contiguous()
            dist.all_to_all_single(received := torch.empty_like(exact), exact, group=group)
            total_exact = received.sum(0) / (ranks if op == dist.ReduceOp.AVG else 1)
            self._compressor.add_error(output_tensor[:SAMPLED_COLUMNS].float(), total_exact)

    def _exchange(self, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the sum of this rank's row over the ranks, in fp32."""
        settings = self._compressor.settings
        if settings.kind in DTYPES:
            small = (rows.float() / len(rows)).to(DTYPES[settings.kind])  # divided first, so that it stays in range
            dist.all_to_all_single(received := torch.empty_like(small), small, group=group)
            return received.float().sum(0) * len(rows)
        block, columns = settings.block or 1, rows.shape[1]
        padded = torch.nn.functional.pad(rows.float(), (0, -columns % block))
        name = self._compressor.next_call(self._name)
        noise = self._compressor.state.noise(name, "scatter", tuple(padded.shape), rows.device)
        message = int8_message(padded.unflatten(1, (-1, block)), noise.unflatten(1, (-1, block)))
        dist.all_to_all_single(received := torch.empty_like(message), message, group=group)
        return read_int8(received, block).sum(0)[:columns]


class OuterAllReduce:
    """Averages the gradients of a unit's shards over the replicas, after they are averaged over the shards (HSDP).

    FSDP2's own all-reduce cannot be replaced, so its mesh has only the shards, and this is its all-reduce hook.
    """

    def __init__(self, compressor: ShardCompressor, name: str) -> None:
        self._compressor, self._name = compressor, name

    def __call__(self, gradient: Tensor) -> None:
        state = self._compressor.outer
        assert state is not None
        state.seed, state.step = self._compressor.state.seed, self._compressor.state.step
        name = self._compressor.next_call(f"replicas/{self._name}")
        for work in EXCHANGES[self._compressor.settings.kind](state, {name: gradient}):
            work.wait()


COMPRESSOR_ATTRIBUTE = "_trimaran_compressor"
MIN_FACTOR_GAIN = 2  # a matrix is sent as factors if they are at least this many times smaller
SAMPLED_VALUES = 1024  # of each parameter, to measure the error of the sum
# By the parts of a parameter's name. Of a name with several kinds the first counts.
LAYER_NAMES: Mapping[LayerKind, str] = {
    "embed": r"embed\w*|\w*_embed|\w*_embeddings?|wte|wpe",
    "head": r"lm_head|head|embed_out|score|classifier",
    "attention": r"(?!\w*norm)(\w*attn\w*|\w*attention\w*|[qkvo]_proj|qkv_proj)",
    "mlp": r"\w*mlp\w*|\w*ffn\w*|feed_forward|experts|shared_expert\w*|(gate|up|down)_proj|fc\d|c_fc",
}


def apply_compression(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Compress what ranks send in place of their gradients: with DDP's communication hook, or in FSDP2's reductions."""
    settings = plan.comm.compression_settings
    if settings.kind == "none" or ranks.data.size() == 1:
        return
    if plan.sharding != "none":
        replicas = ranks.shards.get_group("dp_replicate") if ranks.degrees.dp_replicate > 1 else None
        shard_compressor = ShardCompressor(settings, ranks.shards.get_group("shard"), replicas)
        for name, unit in network.module.named_modules():
            if is_fsdp_module(unit):
                # These need no class of torch, whose module is private: only these methods are called.
                unit.set_custom_reduce_scatter(CompressedReduceScatter(shard_compressor, name))  # pyrefly: ignore
                if shard_compressor.outer is not None:
                    unit.set_all_reduce_hook(OuterAllReduce(shard_compressor, name))
        setattr(network.module, COMPRESSOR_ATTRIBUTE, shard_compressor)
        return
    found = {layer_kind(name) for name, _ in network.module.named_parameters()}  # a tied head is part of the embedding
    for kind in settings.layers:
        if kind not in found:
            has = ", ".join(sorted(each for each in found if each)) or "none of the known kinds"
            raise UserError("P003.compression-layers", where="plan.comm.compression.layers", kind=kind, has=has)
    compressor = GradientCompressor(network.module, settings, ranks.data.get_group(), axis=data_axis(plan))
    setattr(network.module, COMPRESSOR_ATTRIBUTE, compressor)
    network.module.register_comm_hook(compressor, GradientCompressor.send)  # pyrefly: ignore[not-callable]


def compressor_of(module: nn.Module) -> "Compressor | None":
    """Return what `apply_compression` has set; None if gradients are not compressed."""
    return getattr(module, COMPRESSOR_ATTRIBUTE, None)


def layer_kind(name: str) -> LayerKind | None:
    """Return the kind of layer that a parameter of this name belongs to; None if it is another."""
    parts = name.split(".")
    for kind, pattern in LAYER_NAMES.items():
        if any(re.fullmatch(pattern, part) for part in parts):
            return kind
    return None


def is_compressed(name: str, shape: Shape, settings: Compression) -> bool:
    """Return whether a gradient is compressed. Vectors and small matrices under PowerSGD are sent exactly."""
    if settings.layers and layer_kind(name) not in settings.layers:
        return False
    if settings.kind in ("fp16", "bf16"):
        return True
    if settings.kind == "powersgd" and len(shape) > 1:
        rows, columns = matrix_shape(shape)
        return MIN_FACTOR_GAIN * (rows + columns) * (settings.rank or 1) <= rows * columns
    return len(shape) > 1


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """Return the shape of a parameter as a matrix, with the smallest factors: experts are stacked, for example."""
    splits = [(prod(shape[:dim]), prod(shape[dim:])) for dim in range(1, len(shape))]
    return min(splits, key=sum)


class GradientCompressor:
    """Averages the gradients of replicas, bucket by bucket.

    The first collective of a bucket starts as soon as DDP has filled it. Others follow at the end of backward, in the
    order of the buckets. `step` counts from 0; whoever trains sets `state.seed`, and calls `begin_step` before each.
    """

    def __init__(
        self, module: nn.Module, settings: Compression, group: dist.ProcessGroup, *, axis: str = "dp_replicate"
    ) -> None:
        self.settings, self._module, self._axis = settings, module, axis
        self.state = ExchangeState(settings, group, group.rank())
        self.error: Tensor | None = None  # the relative error of the last step, if it was measured
        self._names: dict[int, str] = {}
        self._compressed: set[str] = set()
        self._open: list[tuple[Exchange, dist.Work]] = []
        self._futures: list[tuple[Future[Tensor], Tensor]] = []
        self._samples: list[tuple[Tensor, Gradients]] = []

    def begin_step(self, step: int, loss_scale: float = 1.0) -> None:
        """Say which step the next gradients are of, and what their loss was multiplied by."""
        self.state.step, self.state.loss_scale, self.error = step, loss_scale, None

    def settle(self, refused: Tensor) -> None:
        """End a step: take over what it has changed in the error feedback, unless it was refused (not 0)."""
        for each in self.feedback().values():
            each.settle(refused)
        self.state.step += 1

    def feedback(self) -> dict[str, FeedbackTensors]:
        """Return what is remembered between steps, by name: `residual`, `velocity` and `factor`. Zeros at first."""
        self._prepare()
        named = {"residual": self.state.residual, "velocity": self.state.velocity, "factor": self.state.factor}
        return {name: each for name, each in named.items() if each is not None}

    def send(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Start to average the gradients of a bucket, as DDP's hook. The last one of a backward finishes all."""
        self._prepare()
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
        self._futures.append((future, buffer))
        parameters = bucket.parameters()
        parts = buffer.split([each.numel() for each in parameters])
        gradients = {self._names[id(each)]: part for each, part in zip(parameters, parts, strict=True)}
        is_warm = self.state.step >= (self.settings.warmup_steps or 0)
        small = {name: each for name, each in gradients.items() if is_warm and name in self._compressed}
        exact = {name: each for name, each in gradients.items() if name not in small}
        if small and self.settings.check_every and self.state.step % self.settings.check_every == 0:
            self._start(self._sample(small))
        if exact:
            self._start(exchange_as(self.state, exact))
        if small:
            self._start(EXCHANGES[self.settings.kind](self.state, small))
        if bucket.is_last():
            self._finish()
        return future

    def _start(self, exchange: Exchange) -> None:
        self._open.append((exchange, next(exchange)))

    def _finish(self) -> None:
        """Resume the exchanges in turn until all have ended."""
        while self._open:
            exchanges, self._open = self._open, []
            for exchange, work in exchanges:
                with AXIS_WAITS.span(self._axis):
                    work.wait()
                if (following := next(exchange, None)) is not None:
                    self._open.append((exchange, following))
        if self._samples:
            exact = torch.cat([each for each, _ in self._samples])
            result = torch.cat([_sampled(each) for _, gradients in self._samples for each in gradients.values()])
            self.error = torch.linalg.vector_norm(result - exact) / torch.linalg.vector_norm(exact)
            self._samples = []
        for future, buffer in self._futures:
            future.set_result(buffer)
        self._futures = []

    def _sample(self, gradients: Gradients) -> Exchange:
        """Average some values of each gradient exactly, to compare them with the compressed sum."""
        exact = torch.cat([_sampled(each) for each in gradients.values()]) / self.state.size
        work = dist.all_reduce(exact, group=self.state.group, async_op=True)
        assert work is not None
        yield work
        self._samples.append((exact, gradients))

    def _prepare(self) -> None:
        """Find the parameters and create the error feedback, once the parameters have memory."""
        if self._names:
            return
        trained = [(name, each) for name, each in self._module.named_parameters() if each.requires_grad]
        self._names = {id(each): name for name, each in trained}
        shapes = {name: tuple(each.shape) for name, each in trained if is_compressed(name, each.shape, self.settings)}
        self._compressed = set(shapes)
        if not shapes:
            return
        device = trained[0][1].device
        if self.settings.keeps_residual:
            self.state.residual = FeedbackTensors(shapes, device)
        if self.settings.momentum:
            self.state.velocity = FeedbackTensors(shapes, device)
        if self.settings.kind == "powersgd":
            rank = self.settings.rank or 1
            self.state.matrix_shapes = {name: matrix_shape(shape) for name, shape in shapes.items()}
            factors = {name: (columns, rank) for name, (_, columns) in self.state.matrix_shapes.items()}
            self.state.factor = FeedbackTensors(factors, device)
            for name, each in self.state.factor.accepted.items():
                each.copy_(first_factor(name, tuple(each.shape), self.state.seed, device))


def _sampled(gradient: Tensor) -> Tensor:
    return gradient[:: max(1, len(gradient) // SAMPLED_VALUES)].float()


Compressor = GradientCompressor | ShardCompressor
