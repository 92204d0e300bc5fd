"""Modules that compute with this rank's shard of their parameters. Inputs and outputs are plain tensors."""

import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.models.spec import rows_per_rank
from trimaran.nets.adapters.lora_linear import LoraLinear
from trimaran.nets.local_shards import is_dtensor, local_bias, local_for_compute, local_matmul_weight
from trimaran.parallel.fp8_linear import Fp8Linear


class ShardedLinear(nn.Linear):
    """A linear layer. If its inputs are sharded, its output is a partial sum, without the bias."""

    multiplies_by_weight = True  # see `multiplied_weight`

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, local_matmul_weight(self.weight), local_bias(self))


class ShardedEmbedding(nn.Embedding):
    """An embedding that holds some rows. Its output is a partial sum: zero for tokens of other ranks."""

    def forward(self, input: Tensor) -> Tensor:
        assert is_dtensor(self.weight)
        mesh, local = self.weight.device_mesh, local_for_compute(self.weight)
        first = mesh.get_local_rank() * rows_per_rank(self.num_embeddings, mesh.size())
        rows = input - first
        is_elsewhere = (rows < 0) | (rows >= len(local))
        padding = self.padding_idx
        if padding is not None:
            padding = padding - first if first <= padding < first + len(local) else None
        out = F.embedding(rows.masked_fill_(is_elsewhere, 0), local, padding)
        return out.masked_fill(is_elsewhere.unsqueeze(-1), 0)


KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: ShardedLinear, nn.Embedding: ShardedEmbedding}


def compute_with_shards(module: nn.Module) -> bool:
    """Let a layer compute with its shard, by changing its class. Return whether it does.

    A subclass from elsewhere, whose forward is not known, does not. Our own layers do so as they are.
    """
    if type(module) in KINDS:
        module.__class__ = KINDS[type(module)]
    return computes_with_shards(module)


def computes_with_shards(module: nn.Module) -> bool:
    """Return whether the layer computes with its shard, between plain tensors."""
    return isinstance(module, ShardedLinear | ShardedEmbedding | LoraLinear | Fp8Linear)
