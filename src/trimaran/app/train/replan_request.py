"""What `trimaran replan` asks a running run for: the patch, and the plans before and after with their predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimaran.core import Plan, UserError
from trimaran.core.parse_text import TextError, load_yaml
from trimaran.core.regular_files import write_atomically
from trimaran.launch.supervise.next_attempt import resized
from trimaran.planner.change_plan import change_run, patch_between
from trimaran.runs import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChange:
    """The complete patch, whether the parts of the run stay, and both plans."""

    patch: dict[str, Any]
    how: str
    old: Plan
    new: Plan

    def as_dict(self) -> dict[str, Any]:
        plans = {"old": self.old, "new": self.new}
        return {"patch": self.patch, "how": self.how} | {
            name: {"plan": plan.model_dump(mode="json"), **_numbers(plan)} for name, plan in plans.items()
        }


def plan_change(run: RunDirectory, settings: Sequence[str], environment: Mapping[str, str]) -> PlannedChange:
    """Return the change that the `--set` pairs ask for; without any, that to the best plan with the same results.

    The patch is empty if the run has that plan already.
    """
    recipe, plan = run.read_recipe(), run.read_plan()
    asked = parse_settings(settings)
    if not asked:
        best = resized(plan, recipe, plan.mesh.world_size)
        asked = patch_between(plan, best) if best is not None else {}
    changed = change_run(recipe, plan, asked, environment)
    others = {name: value for name, value in asked.items() if not name.startswith("plan.")}
    patch = patch_between(plan, changed.plan)
    if not patch and changed.recipe == recipe:
        others = {}
    return PlannedChange(patch=patch | others, how=changed.how, old=plan, new=changed.plan)


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Return the patch that `--set` pairs describe."""
    patch: dict[str, Any] = {}
    for pair in settings:
        name, separator, raw = pair.partition("=")
        if not separator or not all(name.strip().split(".")):
            raise UserError("R010", f"'{pair[:80]}' is not a setting", where="--set",
                            fix="write --set plan.micro_batch=4")  # fmt: skip
        try:
            patch[name.strip()] = load_yaml(raw)
        except TextError as error:
            raise UserError("R010", f"the value '{raw[:80]}' is not YAML: {error.what}", where=f"--set {name}",
                            fix="quote the value, or write a plain number or word") from None  # fmt: skip
    return patch


def request_ranks(run: RunDirectory, ranks: int) -> None:
    """Ask the supervisor of the run for another number of ranks. Raises UserError if that is not possible."""
    recipe, plan = run.read_recipe(), run.read_plan()
    now = plan.mesh.world_size
    if ranks == now:
        raise UserError("S040", f"the run has {now} ranks already", where="--ranks", fix="name another number")
    fewest, most = recipe.faults.ranks or (now, now)
    if not fewest <= ranks <= most:
        raise UserError("S043", f"the recipe of this run allows {fewest} to {most} ranks, not {ranks}",
                        where="faults.ranks", fix="stop the run and resume it: `trimaran resume RUN --set "
                        f"faults.ranks=[{min(ranks, fewest)},{max(ranks, most)}]`")  # fmt: skip
    if resized(plan, recipe, ranks) is None:
        raise UserError("S043", f"there is no plan for {ranks} ranks", where="--ranks",
                        fix=f"choose a number that divides the global batch of {recipe.train.global_batch}"
                        )  # fmt: skip
    write_atomically(run.resize_request, f"{ranks}\n")


def _numbers(plan: Plan) -> dict[str, Any]:
    prediction = plan.prediction
    seconds, peak = (prediction.step_seconds, prediction.peak_bytes) if prediction else (None, None)
    return {"step_seconds": seconds, "peak_bytes": peak, "fits": prediction.fits if prediction else None}
