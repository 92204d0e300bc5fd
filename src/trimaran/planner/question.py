"""The planner's input and output."""

from dataclasses import dataclass
from typing import Literal

from trimaran.core import Bytes, Plan, Recipe
from trimaran.cost import HF_MODELS, STACKS, STATE_BYTES, Job, Stack
from trimaran.hardware import Cluster
from trimaran.models import Outline
from trimaran.models.stages import Spec

Goal = Literal["throughput", "memory", "cost", "fewest-gpus"]
GOALS: tuple[Goal, ...] = ("throughput", "memory", "cost", "fewest-gpus")
NO_BYTES = Bytes(0)
# Sources of text that is cut into sequences of one length. Others have samples of different lengths, or images.
SEQUENCE_SOURCES = ("python-stdlib", "text", "jsonl", "shards", "datasets")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A recipe, its model, the cluster, and the goal. Fields that the recipe's plan pins stay.

    spec: the shape of our own model, if it is one.
    outline: None for an unknown model, for which nothing can be predicted.
    for_trainer: search plans that our own trainer runs. If False, search plans that any training system with the
        profile of `stack` could run, with every axis that the outline allows.
    max_plans: how many plans to return at most, each of another mesh.
    """

    recipe: Recipe
    spec: Spec | None
    outline: Outline | None
    cluster: Cluster
    goal: Goal = "throughput"
    for_trainer: bool = True
    stack: Stack = STACKS["trimaran"]
    max_plans: int = 8

    @property
    def job(self) -> Job:
        assert self.outline is not None, "nothing is known about this model"
        is_hf = self.recipe.model.family == "hf" and self.stack is STACKS["trimaran"]
        return Job(
            outline=self.outline,
            seq_len=self.recipe.data.seq_len,
            stack=HF_MODELS if is_hf else self.stack,
            state_bytes=STATE_BYTES[self.recipe.train.optimizer.states],
            can_capture=self.can_capture,
        )

    @property
    def can_capture(self) -> bool:
        """Whether steps can be CUDA graphs: every batch has the same shapes, and the model's code is known."""
        data, model = self.recipe.data, self.recipe.model
        is_text = data.source in SEQUENCE_SOURCES and not data.mixture and not data.isolate_documents
        return is_text and model.family in ("decoder", "hf") and not model.trust_remote_code

    @property
    def positions(self) -> int:
        """The most positions that one sample has in any tower."""
        seq_len = self.recipe.data.seq_len
        return max(tower.sample_positions(seq_len)[0] for tower in self.outline.towers) if self.outline else seq_len

    @property
    def pins(self) -> Plan:
        return Plan() if self.recipe.plan == "auto" else self.recipe.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class NearMiss:
    """A plan that lost, and why: `1.2 GiB over`, `bubble 31 %`, `all-gather exposed 0.4 s on InfiniBand`."""

    plan: Plan
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """The plans that fit, best first, with their predictions; near misses; and hints what would change the answer.

    ranked: the best plan of each mesh; empty if nothing fits.
    misses: plans that lost. If nothing fits, the first one is the plan with the least memory.
    missing_bytes, missing: what that plan lacks, of its device or else of its host; and both as text.
    smallest: the smallest cluster of such devices on which a plan fits; None if there is none.
    part: the cluster that the plans are for, if the goal leaves devices idle.
    """

    question: Question
    ranked: tuple[Plan, ...]
    misses: tuple[NearMiss, ...] = ()
    hints: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    num_considered: int = 0
    missing_bytes: Bytes = NO_BYTES
    missing: str = ""
    smallest: Cluster | None = None
    part: Cluster | None = None

    @property
    def cluster(self) -> Cluster:
        return self.part or self.question.cluster
