"""Compresses the gradients that FSDP2 reduces: the reduce-scatter over shards, and the all-reduce over replicas.

Each value is rounded once before it is sent to the rank that holds its shard, and summed there in fp32. Nothing is
summed in fewer bits, so that nothing overflows. Error feedback would need a residual of the whole gradient on each
rank, which is what sharding avoids.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimaran.core.replica_sync import Compression
from trimaran.nets.local_shards import is_fsdp_module
from trimaran.parallel.comm.gradient_exchange import EXCHANGES, ExchangeState, FeedbackTensors, int8_message, read_int8

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SAMPLED_COLUMNS = 1024  # of each shard, to measure the error of the sum


class ShardCompressor:
    """What the FSDP units of a rank share: the settings, the step, and the measured error of the sums.

    `begin_step` says which step the next gradients are of; random numbers depend on it.
    """

    def __init__(self, settings: Compression, shards: dist.ProcessGroup, replicas: dist.ProcessGroup | None) -> None:
        self.settings, self.state = settings, ExchangeState(settings, shards, shards.rank())
        self.outer = ExchangeState(settings, replicas, replicas.rank()) if replicas is not None else None
        self._squares: list[Tensor] = []  # of errors, and of exact sums
        self._calls: dict[str, int] = {}

    def begin_run(self, seed: int) -> None:
        """Say what random numbers depend on, besides the step."""
        self.state.seed = seed

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
        """Whether this step measures the error of the sums."""
        return bool(self.settings.check_every) and self.state.step % self.settings.check_every == 0

    @property
    def error(self) -> Tensor | None:
        """The relative error of the sums of this rank's shards in this step, if it was measured."""
        if not self._squares:
            return None
        difference, exact = torch.stack(self._squares).sum(0)
        return (difference / exact).sqrt()

    def add_error(self, result: Tensor, exact: Tensor) -> None:
        """Add the difference of a compressed sum from the exact one."""
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


def compress_units(module: nn.Module, compressor: ShardCompressor) -> None:
    """Make the FSDP units of a module send compressed gradients."""
    for name, unit in module.named_modules():
        if is_fsdp_module(unit):
            # These need no class of torch, whose module is private: only these methods are called.
            unit.set_custom_reduce_scatter(CompressedReduceScatter(compressor, name))  # pyrefly: ignore
            if compressor.outer is not None:
                unit.set_all_reduce_hook(OuterAllReduce(compressor, name))
