"""An objective: next-token prediction plus the z-loss of PaLM, which keeps logits from drifting."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trimaran.train.loss.cross_entropy import IGNORED, token_losses
from trimaran.train.loss.objective import LossSums


class ZLoss:
    """The cross-entropy plus `weight` times the squared logarithm of the softmax's denominator, summed over tokens."""

    part_names = ("prediction", "z")
    score_names = ()

    def __init__(self, weight: float = 1e-4) -> None:
        self._weight = weight

    def losses(self, network: Any, output: Tensor, inputs: Mapping[str, Tensor]) -> LossSums:
        labels = network.context.shard(inputs["labels"])  # under cp this rank has some of the positions
        logits = output.full_tensor() if isinstance(output, DTensor) else output  # under tp some of the vocabulary
        valid = (labels != IGNORED).flatten()
        prediction = token_losses(logits, labels).sum()
        z = self._weight * (logits.float().logsumexp(-1).flatten().square() * valid).sum()
        sums = torch.stack([prediction.detach(), z.detach()]).double()
        return LossSums(prediction + z, torch.stack([sums, valid.sum().expand(2).double()], dim=1))

    def score(self, network: Any, output: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        return torch.zeros(0, 2, dtype=torch.float64, device=output.device)


class ZLossPlugin:
    contract = 1

    def open(self, options: Mapping[str, Any], sources: tuple[str, ...]) -> ZLoss:
        return ZLoss(**options)
