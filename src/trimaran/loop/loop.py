"""`trimaran.prepare`: makes a plain PyTorch loop distributed and token-exact in about five changed lines."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from trimaran.core import Plan, UserError
from trimaran.loop.loop_checkpoint import LoopCheckpointer, LoopState
from trimaran.loop.uneven_data import uneven_batches
from trimaran.nets import Network
from trimaran.parallel import apply_plan, build_mesh, gradient_norm, gradient_sync
from trimaran.parallel.apply import SHARDING
from trimaran.parallel.batch_norm import BATCH_NORM, apply_batch_norm, batch_norm_warning
from trimaran.train.process.rank_info import TIMEOUT


@dataclass(frozen=True, slots=True)
class StepResult:
    """The numbers of one optimizer step, over the global batch. Tensors on the device: reading one waits for it."""

    loss: Tensor
    grad_norm: Tensor
    num_tokens: Tensor


class Loop:
    """A model and its optimizer, split over the ranks by `prepare`, for use in a training loop.

    It sums losses and token counts since the last step.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, plan: Plan, device: torch.device) -> None:
        self.model, self.optimizer, self.plan, self.device = model, optimizer, plan, device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._set_sync = gradient_sync(model, plan)
        self._warned, self._is_counted = False, True
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, tokens
        self._state = LoopState(model, optimizer, device)
        self._checkpointers: dict[Path, LoopCheckpointer] = {}

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which should print and write."""
        return self.rank == 0

    def micro_batches(self, batch: Any, *, size: int) -> Iterator[Any]:
        """Yield this rank's micro-batches of `size` rows out of the global `batch`, on the device.

        `batch` is a tensor, or a tuple, list or dict of tensors, whose first dimension is the global batch. Every rank
        must pass the same one. Without sharding, gradients are all-reduced with the last micro-batch only.
        """
        rows = len(tree_leaves(batch)[0])
        stride = size * self.world_size
        if rows == 0 or rows % stride:
            raise UserError("P040", f"a global batch of {rows} rows does not split into micro-batches of {size} on "
                            f"{self.world_size} rank(s)", where="micro_batches(batch, size=...)",
                            fix=f"use a global batch that is a multiple of {stride}, or a smaller size")  # fmt: skip
        self._warn_of_batch_norm(rows // stride)
        for start in range(self.rank * size, rows, stride):
            self._set_sync(start + stride >= rows)
            yield tree_map(lambda each: each[start : start + size].to(self.device, non_blocking=True), batch)  # noqa: B023

    def uneven_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of this rank's own iterable, on the device, until every rank has run out.

        For data that each rank reads for itself, where some ranks have more batches than others. All ranks get equally
        many batches: one that has run out gets its last batch again (or another rank's, if it never had one), and
        `backward` does not count it. Each batch of each rank counts exactly once.
        """

        def set_counted(is_counted: bool) -> None:
            self._is_counted = is_counted

        self._set_sync(True)
        self._warn_of_batch_norm(1)
        yield from uneven_batches(batches, self.device, set_counted)

    def _warn_of_batch_norm(self, num_micro_batches: int) -> None:
        """Warn once if BatchNorm makes this training differ from one process with the full batch."""
        warning = batch_norm_warning(self.model, num_ranks=self.world_size, num_micro_batches=num_micro_batches)
        if warning is not None and not self._warned:
            self._warned = True
            warnings.warn(warning, stacklevel=3)

    def backward(self, loss: Tensor, *, num_tokens: int | Tensor) -> None:
        """Accumulate the gradient of `loss`: the sum over its `num_tokens` valid tokens, not their mean."""
        if not self._is_counted:
            loss, num_tokens = loss * 0.0, 0  # this rank is out of data; its collectives are still needed
        (loss * self.world_size).backward()  # the reduction averages over ranks; this turns the average into a sum
        self._sums[0].add_(loss.detach())
        self._sums[1].add_(num_tokens)  # neither a number nor a tensor makes the host wait for the device

    def step(self, *, clip_norm: float = 0.0) -> StepResult:
        """Divide gradients by the valid tokens of all ranks, clip by the global norm, update, zero the gradients."""
        dist.all_reduce(self._sums)
        total, tokens = self._sums[0], self._sums[1].clamp(min=1)
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        for each in parameters:
            if each.grad is not None:
                each.grad.div_(tokens)
        norm = gradient_norm(parameters)
        if clip_norm:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        result = StepResult(total / tokens, norm, tokens)
        self._sums = torch.zeros_like(self._sums)
        return result

    def save(self, folder: str | Path, step: int) -> Path:
        """Write a checkpoint after `step` steps; return its folder once it is complete and verified.

        It holds the model, the optimizer and the RNG states. Every rank must call it, between two steps. Only the
        newest two are kept.
        """
        return self._checkpointer(folder).save(step)

    def resume(self, folder: str | Path) -> int:
        """Load the newest complete checkpoint in `folder` and return its step; 0 when there is none.

        Every rank must call it, before the first step. The number of ranks and the sharding may have changed since.
        """
        return self._checkpointer(folder).resume()

    def _checkpointer(self, folder: str | Path) -> LoopCheckpointer:
        path = Path(folder).absolute()
        if path not in self._checkpointers:
            self._checkpointers[path] = LoopCheckpointer(path, self._state, self.plan)
        return self._checkpointers[path]


def prepare(model: nn.Module, optimizer: Optimizer, *, sharding: str = "none", batch_norm: str = "local") -> Loop:
    """Join torchrun's process group (or start one of a single rank), split `model` in place, and return its `Loop`.

    `sharding` is `none` (every rank holds everything: DDP), or says what is sharded with FSDP2: the `optimizer` states
    (ZeRO-1), the `gradients` as well (ZeRO-2), or also the `parameters` (ZeRO-3). `batch_norm` says which statistics
    BatchNorm uses: those of its rank (`local`), of all ranks (`sync`), or the running statistics without updating them
    (`frozen`). All ranks start from rank 0's weights. Parameter names do not change. `optimizer` gets the sharded
    parameters.
    """
    if sharding not in SHARDING:
        raise UserError("P041", f"sharding={sharding!r} is not a kind of sharding", where="prepare(sharding=...)",
                        fix="use 'none' (DDP), or 'optimizer', 'gradients' or 'parameters' (ZeRO 1, 2, 3)")  # fmt: skip
    if batch_norm not in BATCH_NORM:
        raise UserError("P042", f"batch_norm={batch_norm!r} is not a BatchNorm mode", where="prepare(batch_norm=...)",
                        fix="use 'local', 'sync' or 'frozen'")  # fmt: skip
    device = _join_process_group()
    world_size = dist.get_world_size()
    axes = {"dp_replicate": world_size} if sharding == "none" else {"dp_shard": world_size}
    plan = Plan.model_validate({"mesh": axes, "sharding": sharding})
    model.to(device)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    ranks = build_mesh(plan.mesh, device_type=device.type)
    apply_batch_norm(model, batch_norm, ranks.data.get_group(), device)
    names = {id(each): name for name, each in model.named_parameters()}
    apply_plan(Network(module=model, blocks=_blocks(model), spec=None), plan, ranks)
    _replace_parameters(optimizer, names, dict(model.named_parameters()))
    return Loop(model, optimizer, plan, device)


def _join_process_group() -> torch.device:
    """Initialise the default process group unless the user has; return this rank's device."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, timeout=TIMEOUT, **({} if dist.is_torchelastic_launched() else alone))
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_node_local_rank(fallback_rank=0))
    torch.cuda.set_device(device)
    return device


def _blocks(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the layers of the ModuleList that holds the most parameters."""
    stacks = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) > 1]
    largest = max(stacks, key=lambda stack: sum(each.numel() for each in stack.parameters()), default=())
    return tuple(largest)


def _replace_parameters(optimizer: Optimizer, names: Mapping[int, str], sharded: Mapping[str, nn.Parameter]) -> None:
    """Give the optimizer the sharded parameters in place of those it was made with. `names` are by id of the old."""
    for group in optimizer.param_groups:
        group["params"] = [sharded[names[id(each)]] for each in group["params"]]
