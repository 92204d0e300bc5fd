"""The mean of a flat tensor over replicas, started now and finished later, uncompressed or in a smaller format."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.core.replica_sync import LocalSteps
from trimaran.parallel.comm.gradient_exchange import gather_single
from trimaran.parallel.comm.outer_codecs import Bf16Codec, Codec, Int8Codec, SparseCodec


class MeanExchange(Protocol):
    """A mean over the replicas on its way. All replicas make the same calls in the same order.

    `sent` is what the others receive of this replica's values; only a sparse exchange needs it.
    """

    sent: Tensor

    def advance(self) -> None:
        """Wait for the first of two collectives and start the second. It may be left out: `finish` does it too."""
        ...

    def finish(self) -> Tensor:
        """Return the mean in fp32, bitwise equal on all replicas."""
        ...


StartExchange = Callable[[Tensor], MeanExchange]
"""Starts to exchange a flat fp32 tensor, which belongs to the exchange from then on."""


def exchange_of(local: LocalSteps, group: dist.ProcessGroup) -> StartExchange:
    """Return the function that starts an exchange in the plan's format."""
    if local.compression == "sparse":
        codec = SparseCodec(local.kept_per_block)
        return lambda values: SparseMean(values, codec, group)
    if local.compression == "none" or group.size() == 1:
        return lambda values: AllReducedMean(values, group)
    quantiser: Codec = Bf16Codec() if local.compression == "bf16" else Int8Codec()
    return lambda values: QuantisedMean(values, quantiser, group)


class AllReducedMean:
    """An all-reduce in fp32."""

    def __init__(self, values: Tensor, group: dist.ProcessGroup) -> None:
        self.sent = values
        self._mean = values.div_(group.size())  # divided first, as torch's averager does
        self._work = dist.all_reduce(self._mean, group=group, async_op=True) if group.size() > 1 else None

    def advance(self) -> None:
        pass

    def finish(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._mean


class QuantisedMean:
    """Each replica sums one part of the values: it receives this part of all, and sends the sum to all, encoded.

    Values are decoded before they are summed, in the order of the replicas. They are rounded twice.
    """

    def __init__(self, values: Tensor, codec: Codec, group: dist.ProcessGroup) -> None:
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


class SparseMean:
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

    def advance(self) -> None:
        pass

    def finish(self) -> Tensor:
        if self._work is None:
            return self.sent.clone()
        self._work.wait()
        total = self._codec.decode(self._gathered[0])
        for each in self._gathered[1:]:
            total += self._codec.decode(each)
        return total.flatten()[: self._size].div_(self._group.size())
