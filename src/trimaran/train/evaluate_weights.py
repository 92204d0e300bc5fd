"""The loss of a trained network on held-out or other data, on one process: the figure that the trainer reports."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path
from typing import Any

import torch

from trimaran.core import Plan, Recipe, UserError
from trimaran.data import (
    IGNORED,
    BatchFeed,
    DataShare,
    Loader,
    SampleReader,
    Sequences,
    TokenFeed,
    Tokenizer,
    TokenShards,
    check_vocabulary,
    token_byte_lengths,
)
from trimaran.nets import Network
from trimaran.parallel import autocast, override_precision
from trimaran.train.evaluate import accuracy_of
from trimaran.train.inputs.training_data import load_training_data
from trimaran.train.loss.objective import LanguageObjective, Objective
from trimaran.train.steppers.stepper import evaluate_micro_batch

ROWS = 4  # sequences of a forward, for data that no plan has a micro-batch for

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutLoss:
    """A mean loss over valid tokens, in nats; `num_bytes` is None if unknown. Accuracy and its counts are by score."""

    loss: float
    tokens: int
    num_bytes: int | None = None
    accuracy: dict[str, float] = field(default_factory=dict)
    accuracy_counts: dict[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))  # beyond that a float overflows

    @property
    def bits_per_byte(self) -> float | None:
        """The loss in bits for each byte of the text, which does not depend on the tokenizer."""
        return self.loss * self.tokens / math.log(2) / self.num_bytes if self.num_bytes else None

    def as_dict(self) -> dict[str, Any]:
        found = {"loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        scores = {"accuracy": self.accuracy, "accuracy_counts": self.accuracy_counts} if self.accuracy else {}
        return found | {"tokens": self.tokens} | scores


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedNetwork:
    """A network with weights on a device, and the plan whose precision it computes in."""

    network: Network
    tokenizer: Tokenizer | None
    device: torch.device
    plan: Plan


def held_out_loss(
    subject: EvaluatedNetwork, recipe: Recipe, *, batches: int | None, cache: Path, progress: Progress
) -> HeldOutLoss:
    """Return the loss on the recipe's held-out data, as the trainer's up to the rounding of its plan.

    `batches` are global batches; by default as many as the trainer evaluates.
    """
    network, plan = subject.network, subject.plan
    rows = gcd(plan.micro_batch, plan.global_batch)
    share = DataShare(rank=0, dp=1, micro_batch=rows, grad_accum=plan.global_batch // rows)
    progress("preparing the data", 0.0)
    data = load_training_data(recipe, network, share, cache=cache)
    count = recipe.train.evaluate.batches if batches is None else batches
    if data.holdout is None or not count:
        what = "the recipe evaluates no batches" if data.holdout is not None else "the recipe holds no data out"
        raise UserError("A045.nothing-evaluate", where="data.holdout", text=what)
    override_precision(network, recipe.train.precision, subject.device)
    return evaluate_feed(subject, data.holdout, data.objective, batches=count, progress=progress)


def text_loss(
    subject: EvaluatedNetwork,
    shards: TokenShards,
    *,
    seq_len: int,
    isolate: bool,
    batches: int | None,
    progress: Progress,
) -> HeldOutLoss:
    """Return the loss on all sequences of packed text, or on those of the first `batches` forwards."""
    check_vocabulary(shards.vocab_size, subject.network.vocabulary)
    seq_len = max(1, min(seq_len, shards.num_tokens - 1))
    count = (shards.num_tokens - 1) // seq_len
    sequences = Sequences(shards, seq_len, isolate, 0, count)
    share = DataShare(rank=0, dp=1, micro_batch=min(ROWS, count), grad_accum=1)
    reader = SampleReader(vocabulary=subject.network.vocabulary)
    feed = TokenFeed(sequences, seed=0, share=share, reader=reader, epochs=1.0)
    steps = math.ceil(count / share.micro_batch)
    steps = steps if batches is None else min(batches, steps)
    return evaluate_feed(subject, feed, LanguageObjective(), batches=steps, progress=progress)


@torch.no_grad()
def evaluate_feed(
    subject: EvaluatedNetwork, feed: BatchFeed, objective: Objective, *, batches: int, progress: Progress
) -> HeldOutLoss:
    """Return the mean loss over `batches` of `feed`, summed and divided once, as `HoldoutEvaluator` does."""
    names = objective.score_names
    sums = torch.zeros(1 + 2 * len(names), dtype=torch.float64, device=subject.device)
    tokenizer = subject.tokenizer
    lengths = None if tokenizer is None else token_byte_lengths(tokenizer, subject.network.vocabulary)
    num_valid = num_bytes = 0
    subject.network.module.eval()
    with Loader(feed, steps=batches) as loader:
        for number, host_batch in enumerate(loader, 1):
            batch = host_batch.to(subject.device)
            with autocast(subject.plan, subject.device):
                for index in range(feed.share.grad_accum):
                    sums += evaluate_micro_batch(objective, subject.network, batch.micro(index))
            num_valid += host_batch.num_valid
            if lengths is not None and "labels" in host_batch.arrays:
                labels = host_batch.arrays["labels"].numpy()
                num_bytes += int(lengths[labels[labels != IGNORED]].sum())
            progress("evaluating", number / batches)
    total, *scores = sums.tolist()
    accuracy, counts = accuracy_of(names, scores, feed, batches)
    return HeldOutLoss(
        loss=total / max(1, num_valid),
        tokens=num_valid,
        num_bytes=num_bytes if lengths is not None and num_bytes else None,
        accuracy=accuracy,
        accuracy_counts=counts,
    )
