"""What is trained for: from what a network returns to a summed loss, its parts, and how often it was right."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trimaran.data.step_batch import Inputs
from trimaran.nets import Network
from trimaran.train.loss.cross_entropy import IGNORED, summed_loss, token_losses


@dataclass(frozen=True, slots=True)
class LossSums:
    """The loss of one micro-batch, summed over this rank's targets and divided by nothing.

    `parts` [number of parts, 2] has for each of the objective's parts its summed loss and its count; None without any.
    """

    total: Tensor
    parts: Tensor | None = None


class Objective(Protocol):
    """One kind of training. `parts` name what the loss is told apart by in the metrics, `scores` what is counted."""

    @property
    def parts(self) -> tuple[str, ...]: ...

    @property
    def scores(self) -> tuple[str, ...]: ...

    def losses(self, network: Network, output: Tensor, inputs: Inputs) -> LossSums:
        """Return the losses of what the network made of one micro-batch."""
        ...

    def score(self, network: Network, output: Tensor, inputs: Inputs) -> Tensor:
        """Return [number of scores, 2]: how much was right, of how much. The shares of all data ranks add up."""
        ...


class LanguageObjective:
    """The next token. With several sources, each has a part of the loss. Where there are answers, they are `scored`.

    An answer is the targets of one document of a row. It is right when the likeliest token is right at each of them:
    then, and only then, greedy decoding would have written it.
    """

    def __init__(self, sources: tuple[str, ...] = (), *, scored: bool = False) -> None:
        self.parts = sources if len(sources) > 1 else ()
        self.scores = ("tokens", "answers") if scored else ()

    def losses(self, network: Network, output: Tensor, inputs: Inputs) -> LossSums:
        labels = network.context.mine(inputs["labels"])
        if not self.parts or "sources" not in inputs:
            return LossSums(summed_loss(output, labels))
        each = token_losses(output, labels)
        return self.told_apart(network, each.sum(), each.detach(), inputs)

    def told_apart(self, network: Network, total: Tensor, each: Tensor, inputs: Inputs) -> LossSums:
        """Return the losses of one micro-batch whose summed loss and whose loss of `each` position are known."""
        if not self.parts or "sources" not in inputs:
            return LossSums(total)
        labels, sources = (network.context.mine(inputs[name]).flatten() for name in ("labels", "sources"))
        found = torch.stack([each, (labels != IGNORED).float()], dim=1)
        return LossSums(total, found.new_zeros(len(self.parts), 2).index_add_(0, sources.long(), found))

    def score(self, network: Network, output: Tensor, inputs: Inputs) -> Tensor:
        if not self.scores:
            return torch.zeros(0, 2, dtype=torch.float64, device=output.device)
        best = likeliest(network, output)
        labels = inputs["labels"]
        valid = labels != IGNORED
        wrong = valid & (best != labels)
        documents = inputs.get("documents")
        if documents is None:
            documents = torch.zeros_like(labels)
        size = int(documents.max()) + 1
        groups = (documents + size * torch.arange(len(labels), device=labels.device)[:, None]).flatten().long()
        counts = valid.new_zeros(2, size * len(labels), dtype=torch.float64)
        counts.index_add_(1, groups, torch.stack([valid.flatten(), wrong.flatten()]).double())
        targets, mistakes = counts
        answered = targets > 0
        right = answered & (mistakes == 0)
        rows = [[valid.sum() - wrong.sum(), valid.sum()], [right.sum(), answered.sum()]]
        return torch.stack([torch.stack(row) for row in rows]).double()


def likeliest(network: Network, logits: Tensor) -> Tensor:
    """Return the likeliest token at each position, [B, T], though positions and vocabulary may be split."""
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return network.context.whole(logits.argmax(-1))


def parts_of(sums: Tensor, names: tuple[str, ...]) -> Mapping[str, float]:
    """Return the mean of each part that came up, of sums [number of parts, 2] over all ranks."""
    return {name: total / count for name, (total, count) in zip(names, sums.tolist(), strict=True) if count}
