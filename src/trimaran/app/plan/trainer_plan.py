"""The plan that `trimaran train` itself runs, where the best plan for any training system is not one of its own."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trimaran.app.plan.emit_files import show_slower, slower
from trimaran.app.recipe.start_command import start_command
from trimaran.core import Plan, UserError
from trimaran.planner import PlanAnswer, check_plan
from trimaran.planner.search.goals import choose


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlan:
    """The best plan that our trainer runs, its command, why it does not run the best plan, and how much that costs."""

    plan: Plan
    command: str
    refusal: UserError
    slower: float

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        prediction = self.plan.prediction.model_dump(mode="json") if self.plan.prediction else None
        plan = {"plan": self.plan.model_dump(mode="json"), "prediction": prediction}
        return {**plan, "next": self.command, "refusal": self.refusal.as_dict(), "slower": self.slower}

    def __str__(self) -> str:
        why = f"`trimaran train` does not run the plan above ({self.refusal.code}: {self.refusal.what})"
        return f"{self.command}\n      {self.plan}, {show_slower(self.slower)}: {why}"


def trainer_plan(best: Plan, answer: PlanAnswer, arguments: Sequence[str]) -> TrainerPlan | None:
    """Return the plan that `trimaran train` would choose; None if it runs `best`, or cannot train the model at all.

    Also None if it is not known what it can do with the model. `arguments` name the model and the recipe.
    """
    question, cluster = answer.question, answer.cluster
    if question.facts is None or question.facts.untrainable is not None:
        return None
    inputs = (question.recipe, question.spec, cluster, question.outline, question.facts)
    try:
        check_plan(best, *inputs)
    except UserError as error:
        refusal = error
    else:
        return None
    try:
        plan = choose(*inputs)
    except UserError:
        return None
    command = shlex.join([*start_command(cluster), "train", *arguments])
    return TrainerPlan(plan=plan, command=command, refusal=refusal, slower=slower(plan, best))
