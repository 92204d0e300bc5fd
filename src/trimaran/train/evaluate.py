"""Evaluation on held-out samples: the mean loss, the accuracy, and sample answers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.data import BatchFeed, Inputs, Loader, Tokenizer
from trimaran.train.agreement import FlagAllReduce
from trimaran.train.inputs.training_data import TrainingData
from trimaran.train.loss.cross_entropy import IGNORED
from trimaran.train.rank_context import RankContext
from trimaran.train.steppers.stepper import Stepper

MAX_ANSWER_TOKENS = 24  # tokens of a sample answer that are generated and shown


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldoutEvaluator:
    """Computes the mean loss over held-out samples, the same under every plan. Without a `feed`: none."""

    context: RankContext
    data: TrainingData
    stepper: Stepper
    counts_samples: bool

    @torch.no_grad()
    def run(self, *, step: int) -> bool:
        """Write an `evaluation` event and return False; return True, without an event, if any rank asked to stop.

        Stop requests are all-reduced with every batch, so that a long evaluation can be interrupted.
        """
        context, feed, names = self.context, self.data.holdout, self.data.objective.score_names
        batches, device, link = context.recipe.train.evaluate.batches, context.rank_info.device, context.link
        if not batches or feed is None:
            return False
        sums, stop = torch.zeros(2 + 2 * len(names), dtype=torch.float64, device=device), False
        self.stepper.set_training(False)
        with link.section("evaluation", step) as report_progress, Loader(feed, steps=batches) as loader:
            for _ in range(batches):
                with link.section("data"):  # the loader has deadlines of its own, and names the sample
                    host_batch = next(loader)
                report_progress()
                any_stop = FlagAllReduce(bool(context.stop)) if batches > 1 else None
                batch = host_batch.to(device)
                sums[1:] += self.stepper.evaluate(batch)
                sums[0] += batch.num_valid * self.counts_samples
                if stop := any_stop is not None and any_stop.wait():
                    break
            if not stop:
                dist.all_reduce(sums)
        self.stepper.set_training(True)
        if stop:
            return True
        tokens, total_loss, *scores = sums.tolist()
        accuracy, counts = accuracy_of(names, scores, feed, batches)
        details = {"accuracy": accuracy, "accuracy_counts": counts} if accuracy else {}
        loss = total_loss / max(1, tokens)
        context.journal.event("evaluation", step=step, loss=loss, tokens=round(tokens), **details)
        return False


def accuracy_of(
    names: Sequence[str], scores: Sequence[float], feed: BatchFeed, batches: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the fraction of each score (pairs of correct and total) and its count without repeated samples."""
    totals = {name: total for name, total in zip(names, scores[1::2], strict=True) if total}
    if not totals:
        return {}, {}
    correct = dict(zip(names, scores[::2], strict=True))
    samples = [sample for step in range(batches) for sample in feed.samples(step, range(feed.share.dp))]
    distinct = len(set(samples)) / len(samples)
    counts = {name: float(max(1, round(total * distinct))) for name, total in totals.items()}
    return {name: correct[name] / total for name, total in totals.items()}, counts


@dataclass(frozen=True, slots=True)
class SampleAnswer:
    """A held-out question, its first expected answer, the generated one, and if all tokens are equal. May be cut."""

    question: str
    expected: str
    generated: str
    correct: bool


def generate_answers(
    predict: Callable[[Inputs], Tensor],
    inputs: Inputs,
    *,
    image_token: int | None = None,
    allows_next: Callable[[], bool] | None = None,
) -> Tensor:
    """Return the predicted next tokens [B, T], on the CPU, with each answer conditioned on its own earlier tokens.

    Every forward replaces the expected tokens by the last predictions, so each answer gains one token. Every rank runs
    the same number of forwards: `allows_next` gives all ranks the same answer before each. A predicted `image_token` is
    not fed back: there is no image for it.
    """
    tokens, labels, documents = inputs["tokens"].clone(), inputs["labels"], inputs["documents"]
    is_answer = (labels[:, :-1] != IGNORED) & (documents[:, 1:] == documents[:, :-1])
    predicted = predict(inputs)
    for _ in range(MAX_ANSWER_TOKENS - 1):
        if allows_next is not None and not allows_next():
            break
        following = predicted.to(tokens.device)[:, :-1]
        replaced = is_answer if image_token is None else is_answer & (following != image_token)
        tokens[:, 1:] = torch.where(replaced, following, inputs["tokens"][:, 1:])
        predicted = predict({**inputs, "tokens": tokens})
    return predicted


def decode_answers(
    inputs: Inputs, predicted: Tensor, tokenizer: Tokenizer, *, max_tokens: int = MAX_ANSWER_TOKENS
) -> Iterator[SampleAnswer]:
    """Yield the answers of a micro-batch, given `generate_answers`; only `max_tokens` tokens of each count."""
    tokens, labels, documents = (inputs[name].cpu() for name in ("tokens", "labels", "documents"))
    for row in range(len(tokens)):
        for document in torch.unique(documents[row]).tolist():
            in_document = documents[row] == document
            positions = (in_document & (labels[row] != IGNORED)).nonzero().flatten()
            if not len(positions):
                continue
            first_answer = positions[positions - torch.arange(len(positions)) == positions[0]]
            expected, generated = (each[row][first_answer[:max_tokens]] for each in (labels, predicted))
            correct = torch.equal(expected, generated)
            ends = (generated == labels[row][first_answer[-1]]).nonzero().flatten().tolist()
            question = in_document & (torch.arange(len(in_document)) <= positions[0])
            texts = (tokens[row][question], expected, generated[: ends[0] + 1] if ends else generated)
            yield SampleAnswer(*(tokenizer.decode(each.tolist()).strip() for each in texts), correct=correct)
