"""A process group of one process that stands for many: collectives return at once, with values that can be trained on.

torch has a fake group, too. It gathers with one copy for each rank, so that a group of 1,024 ranks launches 1,024
kernels, and what a rank receives from a neighbour stays uninitialised. Here a gather is one kernel, and messages are
random numbers. Nothing is sent; what other ranks would contribute is this rank's own contribution:

- gathers repeat this rank's part for every rank, reductions keep this rank's part, exchanges return what was sent;
- a sum of whole numbers (counts of tokens) is multiplied by the number of ranks, a sum of real numbers is not, so that
  gradients keep their size;
- a message from another pipeline stage is drawn from a normal distribution, one block that repeats.

A collective launches the one kernel that writes its result, on the stream where it was called, as NCCL does.
"""

from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

BACKEND = "rehearsal"
# Of the numbers that a neighbour would send, for activations and gradients alike. It is so small that fp16 does not
# overflow, and so large that bf16 does not round to zero.
MESSAGE_STD = 0.01
MESSAGE_BLOCK = 1 << 12  # random numbers that are drawn once and repeated: drawing takes longer than copying


_ProcessGroup: Any = dist.ProcessGroup  # whose methods have other types in every version of torch


class CompletedWork(dist.Work):
    """A complete collective. It holds tensors until waited for as NCCL's does, or all its life as gloo's."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors: list[Tensor] | None = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._tensors and self._tensors[0].is_cuda:
            self._tensors = None
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Future[list[Tensor]]:
        devices: list[Any] = list({each.device for each in self._tensors or () if each.is_cuda})  # it must know them
        future: Future[list[Tensor]] = Future(devices=devices)
        future.set_result(self._tensors or [])
        return future


class RehearsalGroup(_ProcessGroup):
    """One rank of `size`, without the others. The methods have the names by which torch 2.11 and 2.13 call them."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._own_rank, self._num_ranks = rank, size

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        operation = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        if operation == dist.ReduceOp.SUM:
            for each in tensors:
                if not each.is_floating_point():
                    each.detach().mul_(self._num_ranks)
        return CompletedWork([*tensors])

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return CompletedWork([*tensors])

    def barrier(self, opts: Any = None) -> dist.Work:
        return CompletedWork([])

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        for output, given in zip(outputs, inputs, strict=True):
            torch._foreach_copy_([each.detach() for each in output], [given.detach()] * len(output))
        return CompletedWork([each for output in outputs for each in output])

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        parts = output.detach().view(self._num_ranks, -1)
        parts.copy_(given.detach().reshape(1, -1).expand_as(parts))
        return CompletedWork([output, given])

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, given in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, given)
        return CompletedWork([*outputs, *inputs])

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        for output, parts in zip(outputs, inputs, strict=True):
            output.detach().copy_(parts[self._own_rank].detach())
        return CompletedWork([*outputs])

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        output.detach().view(-1).copy_(given.detach().reshape(self._num_ranks, -1)[self._own_rank])
        return CompletedWork([output, given])

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, given in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, given)
        return CompletedWork([*outputs, *inputs])

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> dist.Work:
        """Return what was sent. If more is received than was sent, the rest is zeros."""
        rows = min(len(output), len(given))
        output.detach()[:rows].copy_(given.detach()[:rows])
        if rows < len(output):
            output.detach()[rows:].zero_()
        return CompletedWork([output, given])

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        for output, given in zip(outputs, inputs, strict=True):
            self.all_to_all_single(output, given, (), ())
        return CompletedWork([*outputs, *inputs])

    def send(self, tensors: Sequence[Tensor], destination: int, tag: int = 0) -> dist.Work:
        return CompletedWork([*tensors])

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> dist.Work:
        """Fill with random numbers, in one or two kernels; whole numbers, by which stages agree on shapes, are ones."""
        for each in tensors:
            if not each.is_floating_point():
                each.detach().fill_(1)
                continue
            block, flat = _random_block(each.dtype, each.device), each.detach().view(-1)  # what arrives is contiguous
            whole = len(flat) // MESSAGE_BLOCK * MESSAGE_BLOCK
            if whole:
                flat[:whole].view(-1, MESSAGE_BLOCK).copy_(block.expand(whole // MESSAGE_BLOCK, -1))
            flat[whole:].copy_(block[: len(flat) - whole])
        return CompletedWork([*tensors])

    # The names of torch 2.11 and 2.12.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


@cache
def _random_block(dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)  # not the generators that the rank seeds for its dropout
    return (MESSAGE_STD * torch.randn(MESSAGE_BLOCK, generator=generator)).to(device, dtype)


def register_backend() -> None:
    """Make `rehearsal` a backend of `init_process_group`; may be called again."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(
            BACKEND, lambda store, rank, size, timeout: RehearsalGroup(rank, size), devices=["cpu", "cuda"]
        )
