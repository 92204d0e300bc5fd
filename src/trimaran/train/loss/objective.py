"""Training objectives: from the output of a network to a summed loss, its parts, and accuracy scores."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from trimaran.core import KINDS, Recipe, UserError, load_plugin, plugin_errors
from trimaran.data import Inputs
from trimaran.nets import Network, is_dtensor
from trimaran.train.loss.cross_entropy import IGNORED, summed_loss, token_losses

PARTS = ("part_names", "score_names", "losses", "score")


@dataclass(frozen=True, slots=True)
class LossSums:
    """The loss of one micro-batch, summed over this rank's targets, not divided.

    `parts` [number of parts, 2] holds the summed loss and the count of each part; None if the objective has no parts.
    """

    total: Tensor
    parts: Tensor | None = None


class Objective(Protocol):
    """A training objective. The metrics show the loss by `part_names`; evaluation counts `score_names`."""

    @property
    def part_names(self) -> tuple[str, ...]: ...

    @property
    def score_names(self) -> tuple[str, ...]: ...

    def losses(self, network: Network, output: Tensor, inputs: Inputs) -> LossSums:
        """Return the losses of the network's output for one micro-batch."""

    def score(self, network: Network, output: Tensor, inputs: Inputs) -> Tensor:
        """Return [number of scores, 2]: the correct count and the total count, to be summed over all data ranks."""


class LanguageObjective:
    """Next-token prediction. With several sources, each is a part of the loss. With `scored`, answers are scored.

    Labels are smoothed in training only: the held-out loss stays comparable with that of other runs. An answer is the
    targets of one document of a row. It is correct if the most likely token is correct at every target, which is
    exactly when greedy decoding would generate it.
    """

    def __init__(self, sources: tuple[str, ...] = (), *, scored: bool = False, label_smoothing: float = 0.0) -> None:
        self.part_names = sources if len(sources) > 1 else ()
        self.score_names = ("tokens", "answers") if scored else ()
        self._label_smoothing = label_smoothing

    def smoothing(self, network: Network) -> float:
        """Return the label smoothing of a forward: none in evaluation."""
        return self._label_smoothing if network.module.training else 0.0

    def losses(self, network: Network, output: Tensor, inputs: Inputs) -> LossSums:
        labels = network.context.shard(inputs["labels"])
        if not self.part_names or "sources" not in inputs:
            return LossSums(summed_loss(output, labels, smoothing=self.smoothing(network)))
        losses = token_losses(output, labels, smoothing=self.smoothing(network))
        return self.split_by_source(network, losses.sum(), losses.detach(), inputs)

    def split_by_source(self, network: Network, total: Tensor, losses: Tensor, inputs: Inputs) -> LossSums:
        """Return the summed loss `total` with the parts of its sources; `losses` are those of each position."""
        if not self.part_names or "sources" not in inputs:
            return LossSums(total)
        labels, sources = (network.context.shard(inputs[name]).flatten() for name in ("labels", "sources"))
        sums = torch.stack([losses, (labels != IGNORED).float()], dim=1)
        return LossSums(total, sums.new_zeros(len(self.part_names), 2).index_add_(0, sources.long(), sums))

    def score(self, network: Network, output: Tensor, inputs: Inputs) -> Tensor:
        if not self.score_names:
            return torch.zeros(0, 2, dtype=torch.float64, device=output.device)
        best = predicted_tokens(network, output)
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
        num_targets, num_wrong = counts
        is_answer = num_targets > 0
        correct = is_answer & (num_wrong == 0)
        rows = [[valid.sum() - wrong.sum(), valid.sum()], [correct.sum(), is_answer.sum()]]
        return torch.stack([torch.stack(row) for row in rows]).double()


def predicted_tokens(network: Network, logits: Tensor) -> Tensor:
    """Return the most likely token at each position, [B, T]. Positions and vocabulary may be sharded."""
    logits = logits.full_tensor() if is_dtensor(logits) else logits
    return network.context.gather(logits.argmax(-1))


class ObjectivePlugin(Protocol):
    """The contract of an objective, version 1."""

    contract: int

    def open(self, options: Mapping[str, Any], sources: tuple[str, ...]) -> Objective:
        """Return the objective for the recipe's `objective.options`. `sources` are the names of a mixture's."""


def choose_objective(recipe: Recipe, sources: tuple[str, ...] = (), *, scored: bool = False) -> Objective:
    """Return the objective of a recipe that trains on tokens; see `LanguageObjective` for the arguments."""
    section = recipe.objective
    if section.name in KINDS["objective"].reserved:
        return LanguageObjective(sources, scored=scored, label_smoothing=section.label_smoothing)
    plugin: ObjectivePlugin = load_plugin("objective", section.name)
    with plugin_errors(
        lambda kind, message: UserError(
            "K077.objective-refuses-options",
            where="objective.options",
            section=section.name,
            kind=kind,
            message=message,
        )
    ):
        objective = plugin.open(section.options, sources)
    if missing := [name for name in PARTS if not hasattr(objective, name)]:
        raise UserError("K077.objective", where="objective.name", section=section.name, missing=", ".join(missing))
    return objective
