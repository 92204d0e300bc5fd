"""Averages the gradients of replicated parameters over the ranks, whichever parts of a model a loss came from.

Torch's DDP prepares its reduction in the forward of the whole model. A loop that calls `model.encode(x)`, unfreezes a
layer or branches by its data would train on local gradients, or hang. Here the backward of the loop decides.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.nn.parallel import DistributedDataParallel

from trimaran.core import UserError
from trimaran.parallel import all_gather_int64, gradient_norm

BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20  # the last layers are ready first: their all-reduce starts early
IDLE, LOCAL, REDUCING = range(3)


@dataclass(slots=True)
class GradientBucket:
    """Some parameters whose gradients are reduced together; `flat` ends with one number for each of them.

    That number is above zero after the reduction if any rank had a gradient of the parameter. `num_pending` counts the
    parameters without a gradient in the current backward, and `has_gradient` says which had one on this rank.
    """

    parameters: list[nn.Parameter]
    flat: Tensor
    views: list[Tensor]
    num_pending: int = 0
    has_gradient: list[bool] = field(default_factory=list)
    work: dist.Work | None = None


class GradientReduction:
    """Averages the gradients of `parameters`, by name, over all ranks, while backward computes the next ones.

    The buckets of a backward are reduced in one fixed order, each exactly once on every rank. Ranks whose losses
    depend on different parameters therefore neither hang nor mix gradients: where a rank has none, it counts as zero. A
    parameter that no rank used keeps a gradient of None. The average of gradients that are already equal does not
    change them, so several backwards may be reduced in one step. `sparse` are the ids of parameters with sparse
    gradients. `agree` is called with a text that must be the same on all ranks. With `is_sharded` the other parameters
    of the model are sharded: the reductions do not start until theirs have.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        sparse: frozenset[int],
        agree: Callable[[str], None],
        is_sharded: bool,
    ) -> None:
        self._names = {id(each): name for name, each in parameters.items()}
        self._parameters, self._sparse, self._agree = list(parameters.values()), sparse, agree
        self._world_size = dist.get_world_size()
        self._trained: list[nn.Parameter] = []
        self._buckets: list[GradientBucket] = []
        self._bucket_of: dict[int, GradientBucket] = {}
        self._view_of: dict[int, Tensor] = {}
        self._state, self._next = IDLE, 0
        self._seen: set[int] = set()  # parameters with a gradient in the current backward
        self._late: set[int] = set()  # parameters with several gradients in one backward
        self._is_sharded, self._is_first = is_sharded, True
        for each in self._parameters if self._world_size > 1 else ():
            is_trained = each.requires_grad
            each.requires_grad_(True)  # else it cannot have a hook, and it may be trained later
            each.register_post_accumulate_grad_hook(partial(self._on_gradient, id(each)))
            each.requires_grad_(is_trained)

    @contextmanager
    def during_backward(self, *, is_last: bool) -> Iterator[None]:
        """Reduce the gradients of the backward inside if it `is_last`, else leave them on their rank."""
        if self._world_size == 1 or not self._parameters:
            yield
            return
        trained = [each for each in self._parameters if each.requires_grad]
        if len(trained) != len(self._trained) or any(a is not b for a, b in zip(trained, self._trained, strict=True)):
            self._build(trained)
        for bucket in self._buckets:
            waits = any(id(each) in self._late for each in bucket.parameters)
            bucket.num_pending, bucket.work = len(bucket.parameters) + waits, None
        self._seen.clear()
        self._state, self._next = REDUCING if is_last else LOCAL, 0
        try:
            yield
            self._state = IDLE
            if is_last:
                self._finish()
        finally:
            self._state = IDLE

    def _build(self, trained: Sequence[nn.Parameter]) -> None:
        """Make the buckets for these parameters, the last ones first: backward reaches them first."""
        if self._trained:
            names = blake2b("\n".join(self._names[id(each)] for each in trained).encode(), digest_size=4).hexdigest()
            self._agree(f"a change of the trained parameters (now {len(trained)}, {names})")
        self._trained, self._is_first = list(trained), True
        # Buckets of one dtype and device, in the order in which they are full.
        full: list[list[nn.Parameter]] = []
        filling: dict[object, list[nn.Parameter]] = {}
        for each in (each for each in reversed(trained) if id(each) not in self._sparse):
            kind = each.dtype, each.device
            parameters = filling.setdefault(kind, [])
            parameters.append(each)
            if sum(other.nbytes for other in parameters) >= (BUCKET_BYTES if full else FIRST_BUCKET_BYTES):
                full.append(filling.pop(kind))
        self._buckets, self._bucket_of, self._view_of = [], {}, {}
        for parameters in (*full, *filling.values()):
            size = sum(each.numel() for each in parameters)
            flat = torch.zeros(size + len(parameters), dtype=parameters[0].dtype, device=parameters[0].device)
            bucket, start = GradientBucket(parameters, flat, []), 0
            for each in parameters:
                strides = torch.empty_like(each, device="meta").stride()  # an optimizer may need the parameter's
                view = flat.as_strided(each.shape, strides, start)
                bucket.views.append(view)
                self._bucket_of[id(each)], self._view_of[id(each)] = bucket, view
                start += each.numel()
            self._buckets.append(bucket)

    def _on_gradient(self, key: int, parameter: Tensor) -> None:
        if self._state == IDLE or key in self._sparse:
            return
        if key in self._seen:
            self._late.add(key)
        bucket = self._bucket_of[key]
        if bucket.work is not None:
            raise UserError("P132.backward-computed", where="loop.backward(loss)", names=self._names[key])
        if key in self._seen:
            return
        self._seen.add(key)
        bucket.num_pending -= 1
        # The first backward shows which parameters get several gradients.
        if self._state == LOCAL or self._is_sharded or self._is_first:
            gradient, view = parameter.grad, self._view_of[key]
            # A gradient that is reduced later is kept in its bucket, which has memory for it already.
            if gradient is not None and not gradient.is_sparse and gradient.data_ptr() != view.data_ptr():
                with torch.no_grad():
                    parameter.grad = view.copy_(gradient)
        else:
            while self._next < len(self._buckets) and self._buckets[self._next].num_pending == 0:
                self._reduce_next()

    @torch.no_grad()
    def _reduce_next(self) -> None:
        """Start the all-reduce of the next bucket. Its gradients move into the bucket."""
        bucket = self._buckets[self._next]
        self._next += 1
        gradients = [each.grad for each in bucket.parameters]
        bucket.has_gradient = [each is not None for each in gradients]
        used = bucket.flat[-len(gradients) :]
        if all(bucket.has_gradient):
            used.fill_(1.0)
        else:
            used.copy_(torch.tensor(bucket.has_gradient))
        targets, sources = [], []
        for parameter, view, gradient in zip(bucket.parameters, bucket.views, gradients, strict=True):
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() != view.data_ptr():
                targets.append(view)
                sources.append(gradient.to_dense() if gradient.is_sparse else gradient)
            parameter.grad = None  # a further gradient of this backward must not be added while it is reduced
        if targets:
            torch._foreach_copy_(targets, sources)
        bucket.flat.div_(self._world_size)
        bucket.work = dist.all_reduce(bucket.flat, async_op=True)

    def _finish(self) -> None:
        """Reduce the rest, and give every parameter that any rank used its average."""
        self._is_first = False
        while self._next < len(self._buckets):
            self._reduce_next()
        num_used = 0
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()
            used = bucket.has_gradient
            if not all(used):  # only then the host waits for the device
                used = (bucket.flat[-len(used) :] > 0).tolist()
            for parameter, view, is_used in zip(bucket.parameters, bucket.views, used, strict=True):
                if is_used:
                    parameter.grad = view
                    num_used += 1
        for each in self._trained:
            if id(each) in self._sparse:
                each.grad = self._average_of_sparse(each)
                num_used += each.grad is not None
        if not num_used and not self._is_sharded:
            raise nothing_to_train()

    @torch.no_grad()
    def _average_of_sparse(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the average of a gradient of which each rank has some rows; None if no rank has one."""
        gradient = parameter.grad
        if gradient is not None and not gradient.is_sparse:
            gradient = gradient.to_sparse(1)
        rows, row_shape = 0, parameter.shape[1:]
        if gradient is not None:
            gradient = gradient.coalesce()
            rows = gradient.indices().shape[1]
        counts = all_gather_int64(np.array([rows, gradient is not None], dtype=np.int64))
        if not counts[:, 1].any():
            return None
        most = int(counts[:, 0].max())
        indices = torch.zeros(most, dtype=torch.int64, device=parameter.device)
        values = torch.zeros(most, *row_shape, dtype=parameter.dtype, device=parameter.device)
        if gradient is not None:
            indices[:rows], values[:rows] = gradient.indices()[0], gradient.values() / self._world_size
        all_indices, all_values = ([torch.empty_like(each) for _ in counts] for each in (indices, values))
        dist.all_gather(all_indices, indices)
        dist.all_gather(all_values, values)
        sizes = counts[:, 0].tolist()
        indices = torch.cat([each[:size] for each, size in zip(all_indices, sizes, strict=True)])
        values = torch.cat([each[:size] for each, size in zip(all_values, sizes, strict=True)])
        return torch.sparse_coo_tensor(indices[None], values, parameter.shape, check_invariants=False).coalesce()


class CompiledBuckets:
    """Lets torch.compile cut the graph of a compiled model at buckets, as for DDP, so that reductions overlap."""

    bucket_bytes_cap = BUCKET_BYTES

    def enter(self, module: nn.Module, args: Any) -> None:
        DistributedDataParallel._active_ddp_module = self  # pyrefly: ignore[bad-assignment]

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        DistributedDataParallel._active_ddp_module = None


def cut_compiled_graph(model: nn.Module) -> None:
    """Cut the graph of a model that `torch.compile` returned; others have no graph of their own."""
    if isinstance(model, OptimizedModule):
        buckets = CompiledBuckets()
        model.register_forward_pre_hook(buckets.enter)
        model.register_forward_hook(buckets.leave, always_call=True)


def nothing_to_train() -> UserError:
    """Return the error for a loss that depends on no parameter."""
    return UserError("P133.loss-depends", where="loop.backward(loss)")


@torch.no_grad()
def norm_with_sparse(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the norm over all gradients, of which sparse ones are equal on all ranks."""
    sparse, dense = _sparse_and_dense(parameters)
    if not sparse:
        return gradient_norm(parameters)
    squares = [each.coalesce().values().double().square().sum() for each in sparse]
    if dense:
        squares.append(gradient_norm(dense).double().square())
    return torch.stack(squares).sum().sqrt().float()


@torch.no_grad()
def clip_with_sparse(parameters: Sequence[nn.Parameter], most: float, norm: Tensor) -> None:
    """Scale all gradients so that their norm is at most `most`, like `torch.nn.utils.clip_grads_with_norm_`."""
    sparse, dense = _sparse_and_dense(parameters)
    torch.nn.utils.clip_grads_with_norm_(dense, most, norm)
    factor = (most / (norm + 1e-6)).clamp(max=1.0)  # torch's
    for each in sparse:
        each.mul_(factor)


def _sparse_and_dense(parameters: Sequence[nn.Parameter]) -> tuple[list[Tensor], list[nn.Parameter]]:
    """Return the sparse gradients, and the parameters that have none."""
    sparse = [each.grad for each in parameters if each.grad is not None and each.grad.is_sparse]
    return sparse, [each for each in parameters if each.grad is None or not each.grad.is_sparse]
