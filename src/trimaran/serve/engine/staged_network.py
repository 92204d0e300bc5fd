"""A rank's part of a network, which computes like a whole one: streams come from and go to the neighbouring stages."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trimaran.models.spec import rows_per_rank
from trimaran.nets import Network
from trimaran.nets.paged_cache import PagedExtension
from trimaran.parallel import RankMesh


@dataclass(frozen=True, slots=True)
class StageLinks:
    """Where a rank is in the pipeline, and how it exchanges streams and logits. `dtype` is that of the stream."""

    ranks: RankMesh
    hidden: int
    vocabulary: int
    dtype: torch.dtype

    @property
    def is_first(self) -> bool:
        return self.ranks.rank("pp") == 0

    @property
    def is_last(self) -> bool:
        return self.ranks.rank("pp") == self.ranks.degrees.pp - 1

    @property
    def is_source(self) -> bool:
        """Whether this is rank 0, which wants the logits."""
        return self.is_first and self.ranks.rank("tp") == 0

    def receive_stream(self, num_tokens: int) -> tuple[Tensor, ...]:
        """Return the stream [1, num_tokens, hidden] of the stage before; nothing in the first stage."""
        if self.is_first:
            return ()
        stream = torch.empty(1, num_tokens, self.hidden, dtype=self.dtype, device=self.ranks.device)
        dist.recv(stream, group=self.ranks.group("pp"), group_src=self.ranks.rank("pp") - 1)
        return (stream,)

    def pass_on(self, out: Tensor, num_logits: int) -> Tensor:
        """Give a stage's output to those who need it: a stream to the next stage, logits to rank 0.

        Returns the logits [1, num_logits, vocabulary] on rank 0, and none of them elsewhere.
        """
        pipe, pp_rank, first_tp = self.ranks.group("pp"), self.ranks.rank("pp"), self.ranks.rank("tp") == 0
        if not self.is_last:
            assert out.dtype == self.dtype, "the next stage expects this dtype"
            dist.send(out.contiguous(), group=pipe, group_dst=pp_rank + 1)
        logits = self._gathered(out) if self.is_last else None
        if self.ranks.degrees.pp > 1 and num_logits and first_tp:
            if logits is not None:
                dist.send(logits.contiguous(), group=pipe, group_dst=0)
            elif self.is_first:
                logits = torch.empty(1, num_logits, self.vocabulary, dtype=self.dtype, device=self.ranks.device)
                dist.recv(logits, group=pipe, group_src=self.ranks.degrees.pp - 1)
        if logits is None or not self.is_source:
            return torch.empty(1, 0, self.vocabulary, device=self.ranks.device)
        return logits

    def _gathered(self, out: Tensor) -> Tensor | None:
        """Return the logits of all columns on the first tensor-parallel rank of the last stage, None on the others."""
        if not isinstance(out, DTensor):
            return out
        local, size, width = out.to_local(), self.ranks.degrees.tp, out.shape[-1]
        if not local.shape[1]:
            return local.new_empty(*local.shape[:-1], width)
        # The last ranks may have fewer columns: all send as many as the first.
        padded = F.pad(local, (0, rows_per_rank(width, size) - local.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(size)] if self.ranks.rank("tp") == 0 else None
        dist.gather(padded, parts, group=self.ranks.group("tp"), group_dst=0)
        return None if parts is None else torch.cat(parts, dim=-1)[..., :width]


@dataclass(frozen=True, slots=True)
class StagedNetwork(Network):
    """A stage of a network, or a slice of all its layers, with its links. Every rank must compute each step."""

    part: Network
    links: StageLinks

    def extend_pages(self, extension: PagedExtension, inputs: Mapping[str, Tensor], *stream: Tensor) -> Tensor:
        num_tokens = inputs["tokens"].shape[1]
        out = self.part.extend_pages(extension, inputs, *self.links.receive_stream(num_tokens))
        return self.links.pass_on(out, num_tokens if extension.kept is None else len(extension.kept))

    @property
    def head(self) -> nn.Module | None:
        return self.part.head

    @property
    def vocabulary(self) -> int:
        return self.part.vocabulary

    @property
    def max_seq_len(self) -> int:
        return self.part.max_seq_len

    @property
    def long_after(self) -> int:
        return self.part.long_after
