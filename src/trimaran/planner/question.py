"""The planner's input and output, and the terms of a prediction."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trimaran.core import SOURCES, Bytes, DataSection, Plan, Recipe, RowSizes, TemplateText
from trimaran.cost import HF_MODELS, STACKS, STATE_BYTES, Job, Stack
from trimaran.machine import Cluster
from trimaran.models import HfFacts, Outline, Spec

Goal = Literal["throughput", "memory", "cost", "fewest-gpus", "goodput"]
GOALS: tuple[Goal, ...] = ("throughput", "memory", "cost", "fewest-gpus", "goodput")
NO_BYTES = Bytes(0)
NO_PINS = Plan()  # a search asks for it thousands of times
# Sources of text that is cut into sequences of one length. Others have samples of different lengths, or images.
SEQUENCE_SOURCES = ("python-stdlib", "text", "jsonl", "shards", "datasets", "megatron", "nanogpt")


def is_sequence_source(source: str) -> bool:
    """Return whether a source is text that is cut into sequences of one length, as is that of every plug-in."""
    return source in SEQUENCE_SOURCES or source not in SOURCES


def isolates_documents(data: DataSection) -> bool:
    """Return whether rows hold several documents or samples that do not attend to each other."""
    return data.isolate_documents if is_sequence_source(data.source) else data.samples.batching == "pack"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A recipe, its model, the cluster, and the goal. Fields that the recipe's plan pins stay."""

    recipe: Recipe
    spec: Spec | None  # the shape of our own model, if it is one
    outline: Outline | None  # None for an unknown model, for which nothing can be predicted
    cluster: Cluster
    goal: Goal = "throughput"
    # Search plans that our own trainer runs; else those that any training system with the profile of `stack` could run.
    for_trainer: bool = True
    stack: Stack = STACKS["trimaran"]
    max_plans: int = 8  # to return at most, each of another mesh
    mtbf_hours: float | None = None  # mean hours between failures of one device; None: as in the Llama 3 run
    facts: HfFacts | None = None  # what our trainer can do with a Hugging Face model; None: not known, or our own model
    rows: RowSizes | None = None  # what a row of the data holds, which the outline counts; None: data was not read

    @property
    def job(self) -> Job:
        assert self.outline is not None, "nothing is known about this model"
        is_hf = self.recipe.model.kind.is_hf and self.stack is STACKS["trimaran"]
        return Job(
            outline=self.outline,
            seq_len=self.recipe.data.seq_len,
            stack=HF_MODELS if is_hf else self.stack,
            state_bytes=STATE_BYTES[self.recipe.train.optimizer.states],
            can_capture=self.can_capture,
            isolates_documents=isolates_documents(self.recipe.data),
        )

    @property
    def can_capture(self) -> bool:
        """Whether steps can be CUDA graphs: every batch has the same shapes, and the model's code is known."""
        data, model = self.recipe.data, self.recipe.model
        is_text = is_sequence_source(data.source) and not data.mixture and not data.isolate_documents
        return is_text and model.kind.is_language_model and not model.trust_remote_code

    @property
    def positions(self) -> int:
        """The most positions that one sample has in any tower."""
        seq_len = self.recipe.data.seq_len
        return max(tower.sample_positions(seq_len)[0] for tower in self.outline.towers) if self.outline else seq_len

    @property
    def pins(self) -> Plan:
        return NO_PINS if self.recipe.plan == "auto" else self.recipe.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class NearMiss:
    """A plan that lost, and why: `1.2 GiB over`, `bubble 31 %`, `all-gather exposed 0.4 s on InfiniBand`."""

    plan: Plan
    why: TemplateText


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """The plans that fit, best first, with their predictions; near misses; and hints what would change the answer."""

    question: Question
    ranked: tuple[Plan, ...]  # the best plan of each mesh; empty if nothing fits
    ties: tuple[NearMiss, ...] = ()  # with the first, within the cost model's error, and why it was preferred
    misses: tuple[NearMiss, ...] = ()  # plans that lost; if nothing fits, first the one with the least memory
    choices: tuple[str, ...] = ()  # communication settings of the first plan that are no defaults, with the reasons
    hints: tuple[TemplateText, ...] = ()
    warnings: tuple[str, ...] = ()
    num_considered: int = 0
    missing_bytes: Bytes = NO_BYTES  # that this plan lacks, of its device or else of its host
    missing: str = ""  # both as text
    smallest: Cluster | None = None  # the smallest one of such devices on which a plan fits, if there is one
    part: Cluster | None = None  # that the plans are for, if the goal leaves devices idle

    @property
    def cluster(self) -> Cluster:
        return self.part or self.question.cluster


MEANING = {
    "weights": "weights on the rank",
    "gradients": "accumulated gradients",
    "optimizer": "AdamW's two moments",
    "masters": "fp32 copies of 16-bit weights, or their lower 16 bits",
    "update": "temporary copies for the optimizer update",
    "holes": "memory that the allocator reserves beyond its tensors",
    "activations": "saved by forward for backward",
    "logits": "the logits, and the loss computed from them",
    "casts": "16-bit copies of the weights",
    "gathered": "unsharded weights of the layers at work",
    "heap": "fragmentation of the process heap",
    "process": "the interpreter, torch and its kernels",
    "workspace": "workspace of the matmuls",
}
PHASE_MEANING = {
    "forward": "computing the loss",
    "backward": "computing the gradients, and recompute",
    "comm": "exposed communication, and waiting for the slowest rank",
    "bubble": "waiting while the pipeline fills and drains",
    "offload": "exposed copies to the host and back",
    "optimizer": "clipping and updating the weights",
    "allocator": "retries of the allocator on a nearly full device",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplanationRow:
    """One term of a prediction: bytes or seconds, its fraction of the total, and what it is."""

    term: str
    value: float
    fraction: float
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Where a plan's bytes and seconds go, largest first."""

    memory: tuple[ExplanationRow, ...] = ()
    time: tuple[ExplanationRow, ...] = ()


def explain(plan: Plan) -> Explanation:
    """Return the terms of the plan's prediction; nothing if there is none."""
    if plan.prediction is None:
        return Explanation()
    return Explanation(memory=_rows(plan.prediction.memory, MEANING), time=_rows(plan.prediction.time, PHASE_MEANING))


def _rows(terms: Mapping[str, float], meaning: Mapping[str, str]) -> tuple[ExplanationRow, ...]:
    total = sum(terms.values())
    ranked = sorted(terms.items(), key=lambda item: -item[1])
    return tuple(
        ExplanationRow(term=term, value=value, fraction=value / total, meaning=meaning.get(term, ""))
        for term, value in ranked
        if value
    )
