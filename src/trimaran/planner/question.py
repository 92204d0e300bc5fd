"""What is asked of the planner, and what it answers."""

from dataclasses import dataclass
from typing import Literal

from trimaran.core import Bytes, Plan, Recipe
from trimaran.cost import STACKS, STATE_BYTES, Job, Stack
from trimaran.hardware import Cluster
from trimaran.models import Outline
from trimaran.models.stages import Spec

Goal = Literal["throughput", "memory", "cost", "fewest-gpus"]
GOALS: tuple[Goal, ...] = ("throughput", "memory", "cost", "fewest-gpus")
NOTHING = Bytes(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A recipe, the network that it names, the machines, and what to be good at.

    What the recipe's plan pins stays. `spec` is the shape of our own network where the model is one; `outline` is None
    for a foreign model that nothing is known about, and then nothing can be predicted. `trains` asks for plans that our
    own trainer runs; without it, for any that a training system by the profile of `stack` could, with every axis that
    the outline allows: a Hugging Face model in stages, a tower that is sharded unlike the rest. At most `most_shown`
    plans come back, each of another mesh.
    """

    recipe: Recipe
    spec: Spec | None
    outline: Outline | None
    cluster: Cluster
    goal: Goal = "throughput"
    trains: bool = True
    stack: Stack = STACKS["trimaran"]
    most_shown: int = 8

    @property
    def job(self) -> Job:
        assert self.outline is not None, "nothing is known about this network"
        states = STATE_BYTES[self.recipe.train.optimizer.states]
        return Job(outline=self.outline, seq_len=self.recipe.data.seq_len, stack=self.stack, state_bytes=states)

    @property
    def positions(self) -> int:
        """The most positions that one sample has in any tower."""
        seq_len = self.recipe.data.seq_len
        return max(tower.places(seq_len)[0] for tower in self.outline.towers) if self.outline else seq_len

    @property
    def pins(self) -> Plan:
        return Plan() if self.recipe.plan == "auto" else self.recipe.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class NearMiss:
    """A plan that was not chosen, and why: `1.2 GiB over`, `bubble 31 %`, `all-gather exposed 0.4 s on InfiniBand`."""

    plan: Plan
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """The plans that fit, best first, each with its prediction; what nearly was; and what would change the answer.

    `ranked` has the best plan of each mesh, and is empty when nothing fits: then the first of `misses` is the leanest
    plan, `missing_bytes` what its device or, where that has enough, its host lacks, `missing` what both do in words,
    and `smallest` the smallest cluster of such devices that would do, None where none does. `part` is the cluster that
    the plans are for, where the goal leaves devices idle.
    """

    question: Question
    ranked: tuple[Plan, ...]
    misses: tuple[NearMiss, ...] = ()
    hints: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    num_considered: int = 0
    missing_bytes: Bytes = NOTHING
    missing: str = ""
    smallest: Cluster | None = None
    part: Cluster | None = None

    @property
    def cluster(self) -> Cluster:
        return self.part or self.question.cluster
