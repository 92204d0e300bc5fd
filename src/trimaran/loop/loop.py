"""Trimaran for one's own loop: plain PyTorch becomes distributed and token-exact in about five changed lines."""

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
from trimaran.loop.uneven_data import rounds
from trimaran.nets import Network
from trimaran.parallel import apply_plan, build_mesh, gradient_norm, gradient_sync
from trimaran.parallel.apply import SHARDING
from trimaran.parallel.batch_norm import BATCH_NORM, apply_batch_norm, batch_norm_warning
from trimaran.train.process.rank_info import TIMEOUT


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step of the global batch. The tensors stay on the device until someone looks."""

    loss: Tensor
    grad_norm: Tensor
    num_tokens: Tensor


class Loop:
    """A model and its optimizer, split over the ranks by `prepare`. Knows what was summed since the last step."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, plan: Plan, device: torch.device) -> None:
        self.model, self.optimizer, self.plan, self.device = model, optimizer, plan, device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._set_sync = gradient_sync(model, plan)
        self._warned, self._counts = False, True
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)
        self._state = LoopState(model, optimizer, device)
        self._books: dict[Path, LoopCheckpointer] = {}

    @property
    def is_main(self) -> bool:
        """Whether this rank is the one that prints."""
        return self.rank == 0

    def micro_batches(self, batch: Any, *, size: int) -> Iterator[Any]:
        """Yield this rank's micro-batches of `size` rows out of the global `batch`, on the device.

        `batch` is a tensor, or a tuple, list or dict of tensors, whose first dimension is the global batch, the same on
        every rank. Gradients that are not sharded travel with the last micro-batch only.
        """
        rows = len(tree_leaves(batch)[0])
        stride = size * self.world_size
        if rows == 0 or rows % stride:
            raise UserError("P040", f"a global batch of {rows} rows does not split into micro-batches of {size} on "
                            f"{self.world_size} rank(s)", where="micro_batches(batch, size=...)",
                            fix=f"use a global batch that is a multiple of {stride}, or a smaller size")  # fmt: skip
        self._warn(rows // stride)
        for start in range(self.rank * size, rows, stride):
            self._set_sync(start + stride >= rows)
            yield tree_map(lambda each: each[start : start + size].to(self.device, non_blocking=True), batch)  # noqa: B023

    def rounds(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of this rank's own iterable, on the device, until every rank is out of them.

        For data that every rank reads for itself, and of which some have more than others. All ranks take equally many
        rounds. One that is out meets its last batch again (another rank's, if it never had one), and `backward` counts
        nothing of it. Each batch of each rank is used exactly once.
        """

        def weigh(counts: bool) -> None:
            self._counts = counts

        self._set_sync(True)
        self._warn(1)
        yield from rounds(batches, self.device, weigh)

    def _warn(self, num_micro_batches: int) -> None:
        """Say once what BatchNorm makes of steps like this one."""
        warning = batch_norm_warning(self.model, num_ranks=self.world_size, num_micro_batches=num_micro_batches)
        if warning is not None and not self._warned:
            self._warned = True
            warnings.warn(warning, stacklevel=3)

    def backward(self, loss: Tensor, *, num_tokens: int | Tensor) -> None:
        """Add the gradient of `loss`, which is summed over its `num_tokens` valid tokens and divided by nothing."""
        if not self._counts:
            loss, num_tokens = loss * 0.0, 0  # this rank is out of data, and takes part for the others
        (loss * self.world_size).backward()  # the reduction averages over the ranks; this makes it a sum again
        self._sums[0].add_(loss.detach())
        self._sums[1].add_(num_tokens)  # a plain number goes along with the kernel: the host does not wait

    def step(self, *, clip_norm: float = 0.0) -> StepResult:
        """Divide once by the valid tokens of all ranks, clip by the global norm, update, clear the gradients."""
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
        """Write a checkpoint after `step` steps and return where it is, once it is complete and was read back.

        It holds model, optimizer and random numbers. Every rank calls it, between two steps. The newest two stay.
        """
        return self._book(folder).save(step)

    def resume(self, folder: str | Path) -> int:
        """Load the newest checkpoint in `folder` that is whole and return its step; 0 when there is none.

        Every rank calls it, before the first step. The number of ranks and the sharding may differ from then.
        """
        return self._book(folder).resume()

    def _book(self, folder: str | Path) -> LoopCheckpointer:
        path = Path(folder).absolute()
        if path not in self._books:
            self._books[path] = LoopCheckpointer(path, self._state, self.plan)
        return self._books[path]


def prepare(model: nn.Module, optimizer: Optimizer, *, sharding: str = "none", batch_norm: str = "local") -> Loop:
    """Join the ranks that torchrun started (or stay alone), split `model` over them in place, and return the boat.

    `sharding` is `none` (every rank holds all: DDP), or what each rank holds only a slice of: `optimizer` states
    (ZeRO-1), `gradients` as well (ZeRO-2), or the `parameters` too (ZeRO-3), all by FSDP2. `batch_norm` says whose
    statistics BatchNorm takes: its rank's (`local`), those of all ranks (`sync`), or the running ones, which then stay
    as they are (`frozen`). All ranks start from rank 0's weights. Parameter names do not change, and `optimizer`
    follows its parameters.
    """
    if sharding not in SHARDING:
        raise UserError("P041", f"sharding={sharding!r} is not a way to split a model", where="prepare(sharding=...)",
                        fix="use 'none' (DDP), or 'optimizer', 'gradients' or 'parameters' (ZeRO 1, 2, 3)")  # fmt: skip
    if batch_norm not in BATCH_NORM:
        raise UserError("P042", f"batch_norm={batch_norm!r} is not a way to normalise", where="prepare(batch_norm=...)",
                        fix="use 'local', 'sync' or 'frozen'")  # fmt: skip
    device = _join()
    world_size = dist.get_world_size()
    split = {"dp_replicate": world_size} if sharding == "none" else {"dp_shard": world_size}
    plan = Plan.model_validate({"mesh": split, "sharding": sharding})
    model.to(device)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    ranks = build_mesh(plan.mesh, device_type=device.type)
    apply_batch_norm(model, batch_norm, ranks.data.get_group(), device)
    names = {id(each): name for name, each in model.named_parameters()}
    apply_plan(Network(module=model, blocks=_blocks(model), spec=None), plan, ranks)
    _follow(optimizer, names, dict(model.named_parameters()))
    return Loop(model, optimizer, plan, device)


def _join() -> torch.device:
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
    """Return the layers of the deepest stack: the members of the ModuleList that holds the most parameters."""
    stacks = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) > 1]
    largest = max(stacks, key=lambda stack: sum(each.numel() for each in stack.parameters()), default=())
    return tuple(largest)


def _follow(optimizer: Optimizer, names: Mapping[int, str], now: Mapping[str, nn.Parameter]) -> None:
    """Point the optimizer at the sharded parameters that took the place of those it was made with."""
    for group in optimizer.param_groups:
        group["params"] = [now[names[id(each)]] for each in group["params"]]
