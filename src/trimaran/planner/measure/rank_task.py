"""What the process of a rehearsed rank is asked to do, and what it answers, as JSON. Imports no torch."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from trimaran.core import Plan, Recipe, dump_recipe, parse_recipe

Status = Literal["measured", "out of memory", "refused", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """One rank of a plan to rehearse: how many steps after the warm-up, with data from which cache, on which device."""

    recipe: Recipe
    plan: Plan
    rank: int
    steps: int
    cache: Path
    on_cpu: bool

    def as_json(self) -> str:
        tree = {"recipe": dump_recipe(self.recipe), "plan": self.plan.model_dump(mode="json"), "rank": self.rank,
                "steps": self.steps, "cache": str(self.cache), "on_cpu": self.on_cpu}  # fmt: skip
        return json.dumps(tree)

    @classmethod
    def from_json(cls, text: str) -> Self:
        tree = json.loads(text)
        return cls(
            recipe=parse_recipe(tree["recipe"], name="the rehearsed recipe"),
            plan=Plan.model_validate(tree["plan"]),
            rank=tree["rank"],
            steps=tree["steps"],
            cache=Path(tree["cache"]),
            on_cpu=tree["on_cpu"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRank:
    """What a rank needed.

    peak_bytes: of its tensors, from the first one that was built; `steady_peak_bytes` only after the warm-up.
    reserved_bytes: what its allocator reserved at most; 0 on a CPU.
    step_seconds: the median step. `phases` are its median `forward`, `backward`, `optimizer` and `other`: what the
        trainer counts as communication, of which only local work is left, such as the norm of the gradients.
    stages: mean seconds of a micro-batch's passes, by pipeline stage and kind; empty without a pipeline.
    passes: the last step's passes in order: kind, stage, micro-batch.
    losses, num_refused: of all steps; a refused update has a NaN or Inf.
    """

    peak_bytes: int
    steady_peak_bytes: int
    reserved_bytes: int
    step_seconds: float
    all_seconds: list[float]
    phases: dict[str, float]
    stages: dict[int, dict[str, float]]
    passes: list[tuple[str, int, int]]
    losses: list[float]
    num_refused: int
    build_seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> Self:
        """Return what `as_dict` returned, after JSON has made texts of numbers and lists of tuples."""
        stages = {int(number): kinds for number, kinds in tree["stages"].items()}
        passes = [(kind, stage, number) for kind, stage, number in tree["passes"]]
        return cls(**tree | {"stages": stages, "passes": passes})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAnswer:
    """How a rehearsed rank ended: measured, or why not. `error` are the fields of a UserError if it was refused."""

    status: Status
    device: str = ""
    measured: MeasuredRank | None = None
    message: str = ""
    error: dict[str, str] | None = None

    def as_json(self) -> str:
        measured = self.measured.as_dict() if self.measured else None
        return json.dumps({"status": self.status, "device": self.device, "measured": measured,
                           "message": self.message, "error": self.error})  # fmt: skip

    @classmethod
    def from_json(cls, text: str) -> Self:
        tree = json.loads(text)
        measured = tree.pop("measured")
        return cls(**tree, measured=MeasuredRank.from_dict(measured) if measured else None)
