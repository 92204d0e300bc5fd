"""Compresses the gradients that replicas send. Lossy: it changes the training trajectory."""

import re
from collections.abc import Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from trimaran.core import Plan, UserError
from trimaran.core.plan import data_axis
from trimaran.core.replica_sync import Compression, LayerKind
from trimaran.nets import Network
from trimaran.parallel.comm.axis_waits import AXIS_WAITS
from trimaran.parallel.comm.feedback_tensors import FeedbackTensors, Shape
from trimaran.parallel.comm.gradient_exchange import (
    EXCHANGES,
    Exchange,
    ExchangeState,
    Gradients,
    exchange_exactly,
    first_factor,
)
from trimaran.parallel.comm.sharded_compression import ShardCompressor, compress_units
from trimaran.parallel.mesh import RankMesh

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
        compress_units(network.module, shard_compressor)
        setattr(network.module, COMPRESSOR_ATTRIBUTE, shard_compressor)
        return
    refuse_unmatched_layers(network.module, settings)
    compressor = GradientCompressor(network.module, settings, ranks.data.get_group(), axis=data_axis(plan))
    setattr(network.module, COMPRESSOR_ATTRIBUTE, compressor)
    network.module.register_comm_hook(compressor, send_bucket)  # pyrefly: ignore[not-callable]


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


def refuse_unmatched_layers(module: nn.Module, settings: Compression) -> None:
    """Raise if the model has no layers of a kind that the settings name. A tied head is part of the embedding."""
    found = {layer_kind(name) for name, _ in module.named_parameters()}
    for kind in settings.layers:
        if kind not in found:
            has = ", ".join(sorted(each for each in found if each)) or "none of the known kinds"
            raise UserError("P003", f"compression of the layers {kind} is not possible: the model has no such layers",
                            where="plan.comm.compression.layers", fix=f"it has {has}")  # fmt: skip


def is_compressed(name: str, shape: Shape, settings: Compression) -> bool:
    """Return whether the gradient of a parameter is compressed.

    Vectors are sent exactly: they are few, and their values are not alike. So are small matrices under PowerSGD.
    """
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


def send_bucket(compressor: "GradientCompressor", bucket: dist.GradBucket) -> Future[Tensor]:
    """See `GradientCompressor.send`. DDP checks the annotations of a hook."""
    return compressor.send(bucket)


class GradientCompressor:
    """Averages the gradients of replicas, bucket by bucket.

    The first collective of a bucket starts as soon as DDP has filled it. Others follow at the end of backward, in the
    order of the buckets. `step` counts from 0; whoever trains calls `begin_run`, and `begin_step` before each.
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

    def begin_run(self, seed: int) -> None:
        """Say what random numbers depend on, besides the step."""
        self.state.seed = seed

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
        """Start to average the gradients of a bucket. The last one of a backward finishes all."""
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
            self._start(exchange_exactly(self.state, exact))
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
            self.error = _relative_error(self._samples)
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


def _relative_error(samples: Sequence[tuple[Tensor, Gradients]]) -> Tensor:
    """Return the norm of what the compressed sums differ by, relative to that of the exact sums."""
    exact = torch.cat([each for each, _ in samples])
    result = torch.cat([_sampled(each) for _, gradients in samples for each in gradients.values()])
    return torch.linalg.vector_norm(result - exact) / torch.linalg.vector_norm(exact)


Compressor = GradientCompressor | ShardCompressor
