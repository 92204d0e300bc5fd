"""`trimaran.prepare`: makes a plain PyTorch loop distributed and token-exact in about five changed lines."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, overload
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trimaran.core import Plan, UserError
from trimaran.core.errors import warn_of_old_name
from trimaran.core.plan import Sharding
from trimaran.core.traits import DEVICE_TRAITS
from trimaran.loop.cut_module import Forward
from trimaran.loop.gradient_reduction import (
    GradientReduction,
    clip_with_sparse,
    cut_compiled_graph,
    norm_with_sparse,
    nothing_to_train,
)
from trimaran.loop.loop_checkpoint import LoopState, SavedLoop
from trimaran.loop.loop_checks import LoopChecks, ReplicaAgreement, check_same_model, warn_of_hooks
from trimaran.loop.loop_context import LoopContext, StepResult, as_tree, num_rows_of
from trimaran.loop.loop_evaluation import evaluate, full_state_dict
from trimaran.loop.loop_loader import LoopLoader, build_loader, uneven_batches
from trimaran.loop.loop_optimizers import checked_optimizers, explained_errors, parameters_of, replace_parameters
from trimaran.loop.loss_functions import gather_rows, parameter_norm
from trimaran.loop.loss_reduction import Reduction, check_reduction
from trimaran.loop.sharded_parts import (
    CopyMaker,
    UnitOrder,
    Wrap,
    blocks_of,
    check_is_plain,
    check_shardable,
    copy_weights,
    explained_double_backward,
    gather_for_parts,
    give_forward,
    refuse_deepcopy,
)
from trimaran.loop.split_loop import SplitLoop, prepare_split
from trimaran.nets import Network
from trimaran.parallel import apply_plan, build_mesh, gradient_sync
from trimaran.parallel.axes.fsdp import REPLICATED_ATTRIBUTE
from trimaran.parallel.batch_norm import BATCH_NORM, apply_batch_norm, batch_norm_warning, leave_out_padding
from trimaran.train.process.rank_setup import TIMEOUT

Scaler = torch.amp.GradScaler
_PREPARED: WeakSet[nn.Module] = WeakSet()
NUM_READ_COUNTS = 8  # the first counts on the device that are read, to check the loss's reduction


class Loop(SavedLoop):
    """A model and its optimizer, split over the ranks by `prepare`, for use in a training loop.

    It sums losses and token counts since the last step. Unless a method says otherwise, every rank must call it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        plan: Plan,
        context: LoopContext,
        state: LoopState,
        options: "_Options",
        copies: CopyMaker,
    ) -> None:
        super().__init__(plan, context, state)
        self.model, self._copy_maker = model, copies
        self.optimizer, self.optimizers = optimizers[0], tuple(optimizers)
        self._copies: list[nn.Module] = []
        self._scaler = options.scaler if options.scaler is not None and options.scaler.is_enabled() else None
        # The power of two that fp16 losses are divided by, so that their gradients are as small as a mean's: about the
        # token count of the last step times the ranks; for the first step, that of its first backward.
        self._unit: Tensor | None = None
        self._warned = self._warned_of_count = self._has_gradients = False
        self._num_backwards, self._last_count = 0, (0, -1)
        self._sums = torch.zeros(2, dtype=torch.float64, device=self.device)  # loss, tokens
        self._units = [each for each in model.modules() if isinstance(each, FSDPModule)]
        context.set_syncs.append(gradient_sync(model, plan))
        embeddings = [each for each in model.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
        self._reduction = GradientReduction(
            {name: each for name, each in model.named_parameters() if not isinstance(each, DTensor)},
            sparse=frozenset(id(each.weight) for each in embeddings if each.sparse),
            agree=self._meet,
            is_sharded=bool(self._units),
        )
        self._own = frozenset(id(each) for each in (*model.parameters(), *parameters_of(optimizers)))
        self._replicas = ReplicaAgreement(model, is_on=options.check_replicas)
        self._checks = LoopChecks(
            model, self.optimizers, context, is_on=options.check_loss, is_sharded=bool(self._units)
        )
        if self.world_size > 1 and not self._units:
            cut_compiled_graph(model)
        self._order = UnitOrder(model, context.calls)
        if self._units:
            gather_for_parts(model, self._before_forward)
            model.register_forward_pre_hook(lambda *_: self._before_forward(), prepend=True)
            model.register_state_dict_pre_hook(self._before_state_dict)
            refuse_deepcopy(model)

    @property
    def is_padding(self) -> bool:
        """Whether this rank has no rows of the current batch. It gets a copy of one, which counts nothing."""
        return self._context.is_padding

    def prepare(
        self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], *, sharding: str = "none",
        batch_norm: str = "local", scaler: Scaler | None = None, wrap: Wrap | None = None, check_replicas: bool = True,
        check_loss: bool = True,
    ) -> "Loop":  # fmt: skip
        """Return the loop of another model and optimizer of the same training, such as a GAN's discriminator.

        Both work on the batches that either yields, and `save` and `resume` of either cover both.
        """
        options = _Options(sharding, batch_norm, scaler, wrap, check_replicas, check_loss)
        return _prepare(model, optimizer, options, self._context, self._state)

    def micro_batches(self, batch: Any, *, size: int, batch_dim: int | None = None) -> Iterator[Any]:
        """Yield this rank's micro-batches of up to `size` rows out of the global `batch`, on the device.

        `batch` is a tensor, or a tuple, list or dict of tensors, whose dimension `batch_dim` (the first) is the global
        batch. Lists with a text for each row are split too. Every rank must pass the same one: that is checked now and
        then. It may also be a batch of `loader`, which holds this rank's rows. Without sharding, gradients are
        all-reduced with the last micro-batch only.
        """
        context, where = self._context, "micro_batches(batch, size=...)"
        if size < 1:
            raise UserError("P040.micro-batches-rows", where=where, size=size)
        dim = batch_dim or 0
        if batch is not None and batch is context.local_batch:
            starts = range(0, context.max_local_rows, size)
            num_rows, take = context.max_local_rows, context.local_rows_of
            dim = context.loader_dim if batch_dim is None else batch_dim
        else:
            num_rows = num_rows_of(batch, where, dim=dim)
            context.check_same(batch, num_rows=num_rows, where=where)
            starts = range(0, num_rows, size * self.world_size)
            take = context.rows_of
        self._warn_of_batch_norm(len(starts))
        tree = as_tree(batch)
        for start in starts:
            context.set_sync(start == starts[-1])
            yield take(tree, start, min(start + starts.step, num_rows), dim=dim)

    def local_rows(self, batch: Any, *, last: bool = True, batch_dim: int = 0) -> Any:
        """Return this rank's rows of the global `batch`, on the device. Every rank must pass the same batch.

        `batch_dim` is the dimension of the rows: 1 for tensors of [sequence, rows]. Lists with a text for each row are
        split too. A batch of `loader` holds these rows already. With several batches a step, `last=False` for all but
        the last one saves their all-reduces.
        """
        self._context.set_sync(last)
        if batch is not None and batch is self._context.local_batch:
            return batch
        where = "local_rows(batch)"
        num_rows = num_rows_of(batch, where, dim=batch_dim)
        self._context.check_same(batch, num_rows=num_rows, where=where)
        self._warn_of_batch_norm(1)
        return self._context.rows_of(as_tree(batch), 0, num_rows, dim=batch_dim)

    def gather(self, rows: Tensor, *, dim: int = 0) -> Tensor:
        """Return the rows of all ranks along `dim`, in the order of the global batch, with gradients to every rank.

        For losses that compare rows with each other. Ranks may have different numbers of rows, and copies on a rank
        without rows are left out. Compute the whole loss on every rank and count all rows, or compute that of the
        rank's own rows and count these. Every rank must call it, in every micro-batch.
        """
        self._checks.before_gather()
        return gather_rows(rows, is_padding=self._context.is_padding, dim=dim)

    def loader(
        self, data: Any, *, batch_size: int | None = None, shuffle: bool = True, seed: int | None = None,
        batch_dim: int = 0,
    ) -> LoopLoader:  # fmt: skip
        """Return a loader of which each rank loads only its rows of every global batch, on the device.

        `data` is a DataLoader, whose dataset, batch size, sampler, collate function and workers are kept, or a dataset
        with the `batch_size` of all ranks together. `seed` decides the order; by default it is torch's of rank 0.
        `batch_dim` is the dimension along which its collate function stacks samples.
        """
        self._warn_of_batch_norm(1)
        self._meet("loop.loader()")
        loader = build_loader(self._context, data, batch_size=batch_size, shuffle=shuffle, seed=seed)
        loader.batch_dim = batch_dim
        return loader

    def uneven_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of this rank's own iterable, on the device, until every rank has run out.

        For data that each rank reads for itself, where some ranks have more batches than others. All ranks get equally
        many batches: one that has run out gets its last batch again (or another rank's, if it never had one), and
        `backward` does not count it. Each batch of each rank counts exactly once.
        """
        self._context.set_sync(True)
        self._context.any_padding = True  # only its own rank knows when data has run out
        self._warn_of_batch_norm(1)
        for batch in uneven_batches(batches, self.device, self._context.set_counted):
            self._context.note_rows(batch, 0)
            yield batch

    def rounds(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Deprecated: the old name of `uneven_batches`."""
        warn_of_old_name("Loop.rounds")
        return self.uneven_batches(batches)

    def _warn_of_batch_norm(self, num_micro_batches: int) -> None:
        """Warn once if BatchNorm makes this training differ from one process with the full batch."""
        warning = batch_norm_warning(self.model, num_ranks=self.world_size, num_micro_batches=num_micro_batches)
        if warning is not None and not self._warned:
            self._warned = True
            warnings.warn(warning, stacklevel=3)

    def backward(
        self,
        loss: Tensor,
        *,
        num_tokens: int | Tensor | None = None,
        num_samples: int | Tensor | None = None,
        reduction: Reduction | None = None,
    ) -> None:
        """Accumulate the gradient of `loss`: the sum over its `num_tokens` valid tokens, or over its `num_samples`.

        With `reduction="mean"` the loss is their mean. A loss that is visibly a mean is refused without it.
        """
        check_is_plain(loss)
        if self._has_gradients and not self._any_gradient():
            self._forget()  # they were cleared since the last backward, as in SAM
        if not self._checks.num_backwards and self._any_gradient():
            if len(self._context.set_syncs) == 1:
                self._checks.found_foreign_gradients()
            else:  # the backward of another loop left them, such as a generator's in its critic
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
        count = self._count(loss, num_tokens, num_samples, reduction)
        loss = loss.to(torch.promote_types(loss.dtype, torch.float32))  # a sum may exceed the range of fp16
        if reduction == "mean":
            loss = loss * count
            is_empty = count == 0  # a mean of nothing is NaN, and counts nothing
            if isinstance(is_empty, Tensor) and not is_empty.is_cpu:  # the host must not wait for it
                loss = loss.masked_fill(is_empty, 0.0)
            elif is_empty:
                loss = loss.nan_to_num() * 0.0
        if self._context.is_padding:
            loss, count = loss.nan_to_num() * 0.0, 0  # this rank has no rows; its collectives are still needed
        if self._context.is_synced or self._units:  # else it needs no other rank
            self._context.calls.note("loop.backward()")
        total = loss * self.world_size  # the reduction averages over ranks; this turns the average into a sum
        if self._scaler is not None:
            if self._unit is None:
                first = torch.zeros((), dtype=torch.float64, device=self.device).add_(count)
                dist.all_reduce(first)
                self._unit = self._power_of_two(first)
            total = self._scaler.scale(total / self._unit)
        with self._reduction.during_backward(is_last=self._context.is_synced):
            if total.requires_grad:
                with explained_double_backward():
                    total.backward()
            elif self.world_size == 1 or self._units:  # the loss of another rank may have gradients
                raise nothing_to_train()
        self._sums[0].add_(loss.detach())
        self._sums[1].add_(count)  # neither a number nor a tensor makes the host wait for the device
        self._has_gradients = self._has_gradients or self._any_gradient()
        self._checks.after_backward()

    def _count(
        self, loss: Tensor, num_tokens: int | Tensor | None, num_samples: int | Tensor | None, reduction: str | None
    ) -> int | Tensor:
        """Return how many tokens or samples the loss covers, after checking that it is reduced as the caller says."""
        given = [each for each in (num_tokens, num_samples) if each is not None]
        if len(given) != 1 or reduction not in (None, "sum", "mean"):
            raise UserError("P048.backward-needs-know", where="loop.backward(loss, ...)")
        (count,), self._num_backwards = given, self._num_backwards + 1
        is_on_device = isinstance(count, Tensor) and not count.is_cpu
        is_read = not is_on_device or self._num_backwards <= NUM_READ_COUNTS
        if is_read:
            check_reduction(loss, claimed=reduction, count=float(count))
        self._checks.before_backward(loss, count=float(count) if is_read else None, is_mean=reduction == "mean")
        # Two losses of the same rows that are each counted in full have half of the gradient.
        rows = self._context.num_dealt
        if rows and isinstance(count, int) and (rows, count) == self._last_count and not self._warned_of_count:
            self._warned_of_count = True
            warnings.warn(
                f"backward was called twice for the same rows, each time with a count of {count}: the gradient is "
                f"divided by {2 * count}. If both are losses of the same samples, add them and call backward once.",
                stacklevel=3,
            )
        self._last_count = rows, count if isinstance(count, int) else -1
        return count

    def _power_of_two(self, tokens: Tensor) -> Tensor:
        """Return about the number of tokens of a step times the ranks."""
        return torch.exp2(torch.log2((tokens * self.world_size).clamp(min=1)).floor()).float()

    def zero_grad(self) -> None:
        """Clear the gradients since the last step, and their counts: the next backward starts over."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self._forget()

    def _forget(self) -> None:
        self._sums = torch.zeros_like(self._sums)
        self._last_count, self._has_gradients = (0, -1), False
        self._checks.forget()

    def _any_gradient(self) -> bool:
        return any(each.grad is not None for each in parameters_of(self.optimizers))

    def step(self, *, clip_norm: float = 0.0, before_update: Callable[[], None] | None = None) -> StepResult:
        """Divide gradients by the valid tokens of all ranks, clip by the global norm, update, zero the gradients.

        With a scaler, gradients are unscaled first. If one is not finite, no rank updates, and the scale decreases.
        `before_update` is called before clipping, when `parameter.grad` is the gradient of the mean over the global
        batch; it may change it. Of a sharded parameter a rank holds its part.
        """
        context, scaler = self._context, self._scaler
        if not context.is_synced and self.world_size > 1:
            raise UserError("P057.gradients-step", where="loop.step()")
        context.calls.note("loop.step()")
        self._checks.before_step()
        dist.all_reduce(self._sums)
        total, tokens = self._sums[0], self._sums[1].masked_fill(self._sums[1] == 0, 1.0)
        divisor = tokens if self._unit is None else tokens / self._unit
        parameters = parameters_of(self.optimizers)
        for each in parameters:
            if id(each) not in self._own:
                raise UserError("P130.optimizer-trains-parameter", where="loop.step()", each_shape=list(each.shape))
        for each in parameters:
            if each.grad is not None:
                each.grad.div_(divisor)
        if scaler is not None:
            for optimizer in self.optimizers:
                scaler.unscale_(optimizer)
        if before_update is not None:
            before_update()
        norm = norm_with_sparse(parameters)
        if clip_norm:
            clip_with_sparse(parameters, clip_norm, norm)
        with self._checks.updating():
            for optimizer in self.optimizers:
                if scaler is None:
                    with explained_errors(optimizer, is_sharded=bool(self._units)):
                        optimizer.step()
                    continue
                for found in scaler._found_inf_per_device(optimizer).values():
                    found.copy_(~norm.isfinite())  # of the gradients of all ranks, so that all skip the step or none
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
            self._unit = self._power_of_two(tokens)
        self.zero_grad()
        for unit in self._units:
            unit.reshard()  # a forward since the last backward may have left gathered weights, which are now outdated
        context.num_steps += 1
        self._replicas.check(context.num_steps)
        self._order.check()
        for hook in context.step_hooks:
            hook()
        return StepResult(total / tokens, norm, tokens)

    def copy_of(self, model: nn.Module) -> nn.Module:
        """Return a copy of the loop's model for averages of its weights (EMA) or as a target network.

        It is sharded as the model, in eval mode and without gradients. `update_copy` makes it follow the model;
        checkpoints hold it if it is made before `resume`. Every rank must call it.
        """
        if model is not self.model:
            raise UserError("P137.model-loop", where="loop.copy_of(model)")
        made = self._copy_maker.make(self.device)
        if self._units:
            gather_for_parts(made, self._before_forward)
            made.register_forward_pre_hook(lambda *_: self._before_forward(), prepend=True)
            refuse_deepcopy(made)
        self._copies.append(made)
        self._state.add_copy(made, model)
        return made

    def update_copy(self, copy: nn.Module, *, decay: float) -> None:
        """Move a copy's weights towards the model's: `decay` of their difference is left, and buffers are copied.

        Call it after `step`. A target network with soft updates of tau has `decay=1 - tau`; 0 takes the weights over.
        """
        if not any(copy is each for each in self._copies) or not 0 <= decay < 1:
            raise UserError(
                "P137.update-copy", where="loop.update_copy(copy, decay=...)", decay=decay, kind=type(copy).__name__
            )
        copy_weights(self.model, copy, decay=decay)

    def parameter_norm(self, parameters: Iterable[Tensor] | None = None) -> Tensor:
        """Return the L2 norm over the model's parameters, or those given, for use in a loss. Every rank must call it.

        Count it like the rest of the loss: with `num_samples=n` a penalty is `n * 0.01 * loop.parameter_norm() ** 2`
        beside a sum, and without the `n` beside a mean.
        """
        return parameter_norm(self.model, self.model.parameters() if parameters is None else parameters)

    def evaluate(self, measure: Callable[[Any], Any], batches: Iterable[Any]) -> Any:
        """Return the sums of what `measure(batch)` returns over all `batches`, as numbers, the same on every rank.

        Each rank measures its rows of a batch, with the model in eval mode and without gradients. `measure` returns a
        number, or a tuple or dict of numbers, that are sums over its rows. `batches` are global batches, the same on
        every rank, or a `loader`. Random generators continue afterwards as if nothing had been evaluated.
        """
        self._meet("loop.evaluate()")
        return evaluate(self._context, self.model, measure, batches)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's whole weights and buffers, on the CPU of the main rank; an empty dict on the others."""
        self._meet("loop.state_dict()")
        with self._context.evaluating():
            return full_state_dict(self.model, is_main=self.is_main)

    def _meet(self, call: str) -> None:
        self._context.calls.meet(
            call, fix=f"call {call} on every rank, outside of any `if loop.is_main`; print and write on the main rank"
        )

    def _before_forward(self) -> None:
        """Make sure that all ranks call a sharded model: its weights are all-gathered in forward."""
        if self._context.is_evaluating or self.world_size == 1:
            return
        if self.model.training and torch.is_grad_enabled():
            self._context.calls.note("a forward of the training step")
            return
        self._context.calls.meet(
            "a call of the sharded model", fix="call it on every rank, or evaluate with loop.evaluate(measure, batches)"
        )

    def _before_state_dict(self, model: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not self._context.is_evaluating and self.world_size > 1:
            fix = "weights = loop.state_dict() on every rank, outside of any `if loop.is_main`; then write on one"
            self._context.calls.meet("model.state_dict() of a sharded model", fix=fix)


@overload
def prepare(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], *, sharding: str = "none", batch_norm: str = "local",
    scaler: Scaler | None = None, wrap: Wrap | None = None, check_replicas: bool = True, check_loss: bool = True,
) -> Loop: ...  # fmt: skip


@overload
def prepare(
    model: nn.Module, optimizer: Optimizer, *, plan: Plan | Mapping[str, Any], forward: Forward, example: Any,
    tensor: Mapping[str, str] | None = None,
) -> SplitLoop: ...  # fmt: skip


def prepare(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], *, sharding: str = "none", batch_norm: str = "local",
    scaler: Scaler | None = None, wrap: Wrap | None = None, check_replicas: bool = True, check_loss: bool = True,
    plan: Plan | Mapping[str, Any] | None = None,
    forward: Forward | None = None, example: Any = None, tensor: Mapping[str, str] | None = None,
) -> Loop | SplitLoop:  # fmt: skip
    """Join torchrun's process group (or start one of a single rank), split `model` in place, and return its `Loop`.

    `sharding` is `none` (every rank holds everything: DDP), or says what is sharded with FSDP2: the `optimizer` states
    (ZeRO-1), the `gradients` as well (ZeRO-2), or also the `parameters` (ZeRO-3). `batch_norm` says which statistics
    BatchNorm uses: those of its rank (`local`), of all ranks (`sync`), or the running statistics without updating them
    (`frozen`). `scaler` is torch's GradScaler, for fp16. All ranks start from rank 0's weights. Parameter names do not
    change. `optimizer` gets the sharded parameters. It may be a list of optimizers for different parameters, such as
    Muon for the matrices and AdamW for the rest.

    `wrap` says which modules of a sharded model are gathered one at a time: those of a class or of several
    (`wrap=Block`), or the smallest with at least so many parameters (`wrap=1_000_000`). By default these are the layers
    of the largest `nn.ModuleList`. `check_replicas` compares what all ranks hold after the first updates, and then now
    and then. `check_loss` looks in the first steps whether the loss is one that can be computed from parts of a batch.

    With `plan`, such as `{"pp": 2}` or `{"tp": 2}`, the model is cut into pipeline stages and slices instead, and a
    `SplitLoop` is returned. `forward(rows)` returns the summed loss of the rows of a batch and their count, `example`
    is a batch, and `tensor` says which linear layers tp splits, and how: `{"*.up": "columns", "*.down": "rows"}`.
    """
    if plan is None:
        if forward is not None or example is not None or tensor is not None:
            raise UserError("P103.forward-example-tensor", where="prepare(plan=...)")
        options = _Options(sharding, batch_norm, scaler, wrap, check_replicas, check_loss)
        return _prepare(model, optimizer, options, None, None)
    if forward is None or example is None or (sharding, batch_norm, scaler, wrap) != ("none", "local", None, None):
        raise UserError("P103.plan-needs-forward", where="prepare(plan=...)")
    if not isinstance(optimizer, Optimizer):
        raise UserError("P131.model-split-plan", where="prepare(model, optimizer, plan=...)")
    device = _join_process_group()
    return prepare_split(model, optimizer, plan, device, forward=forward, example=example, tensor=tensor)


@dataclass(frozen=True, slots=True)
class _Options:
    sharding: str
    batch_norm: str
    scaler: Scaler | None
    wrap: Wrap | None
    check_replicas: bool
    check_loss: bool


def _prepare(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    options: _Options,
    context: LoopContext | None,
    state: LoopState | None,
) -> Loop:
    sharding, batch_norm = options.sharding, options.batch_norm
    if sharding not in get_args(Sharding):
        raise UserError("P041.sharding-not-kind", where="prepare(sharding=...)", sharding=sharding)
    if batch_norm not in BATCH_NORM:
        raise UserError("P042.batch-norm", where="prepare(batch_norm=...)", batch_norm=batch_norm)
    if model in _PREPARED:
        raise UserError("P131.model-loop-already", where="prepare(model, optimizer)")
    is_sharded = sharding != "none"
    optimizers = checked_optimizers(model, optimizer, is_sharded=is_sharded)
    blocks_of(model, options.wrap, is_sharded=is_sharded)  # checks `wrap` before ranks are joined
    device = _join_process_group()
    world_size = dist.get_world_size()
    axes = {"dp_shard": world_size} if is_sharded else {"dp_replicate": world_size}
    plan = Plan.model_validate({"mesh": axes, "sharding": sharding})
    model.to(device)
    check_same_model(model)
    for tensor in model.state_dict().values():
        if isinstance(tensor, Tensor):  # a module's extra state may be anything
            dist.broadcast(tensor, src=0)
    ranks = build_mesh(plan.mesh, device_type=device.type)
    apply_batch_norm(model, batch_norm, ranks.data.get_group(), device)

    def shard(module: nn.Module) -> None:
        give_forward(module)
        for each in module.parameters():
            if each.ndim == 0:  # FSDP cannot shard a scalar; the loop reduces its gradient
                setattr(each, REPLICATED_ATTRIBUTE, True)
        blocks = blocks_of(module, options.wrap, is_sharded=True)
        apply_plan(Network(module=module, blocks=blocks, spec=None), plan, ranks)

    copies = CopyMaker(model, shard, is_sharded=is_sharded)
    if is_sharded:
        warn_of_hooks(model)
        check_shardable(model)
        names = {id(each): name for name, each in model.named_parameters()}
        shard(model)
        replace_parameters(optimizers, names, dict(model.named_parameters()))
    context = context or LoopContext(device)
    leave_out_padding(model, context)
    state = state or LoopState(device)
    loop = Loop(model, optimizers, plan, context, state, options, copies)
    state.add(model, optimizers, loop._scaler)
    _PREPARED.add(model)
    return loop


def _join_process_group() -> torch.device:
    """Initialise the default process group unless the user has; return this rank's device."""
    if not dist.is_initialized():
        backend = DEVICE_TRAITS["cuda" if torch.cuda.is_available() else "cpu"].group_backends
        alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, timeout=TIMEOUT, **({} if dist.is_torchelastic_launched() else alone))
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_node_local_rank(fallback_rank=0))
    torch.cuda.set_device(device)
    return device
