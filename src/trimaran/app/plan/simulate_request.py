"""Reads what `trimaran simulate` is asked for: a run, a plan file, a recipe or a model; and fits it to the cluster."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trimaran.app.recipe.options import RUNS
from trimaran.app.recipe.plan_request import read_plan_request, say_reference
from trimaran.app.recipe.request import read_question
from trimaran.core import Plan, UserError
from trimaran.core.parse_text import TextError, load_json
from trimaran.core.regular_files import read_regular_text
from trimaran.machine import Cluster, refuse_mixed
from trimaran.models import PRESETS
from trimaran.planner import Question
from trimaran.planner.hints import resized_cluster
from trimaran.planner.search.goals import best_plans, no_fit_error, nothing_fits, predicted

MAX_FAILURES = 200_000
PLAN_FILE = re.compile(r"\.json$")
PLAN_FIX = "name a run, its plan.json, a file of `trimaran plan --json`, a recipe or a model"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateRequest:
    """A plan, the part of the cluster that trains, and the nodes that it leaves over; None: none are given.

    notes: what was changed to fit the plan to the cluster.
    """

    question: Question
    plan: Plan
    cluster: Cluster
    spares: int | None = None
    notes: tuple[str, ...] = ()


def read_simulate_request(
    what: str | None, shortcuts: Mapping[str, object], settings: Sequence[str]
) -> SimulateRequest:
    """Return the request for `what`. `shortcuts` and `settings` are as for `plan`; a given plan stays as it is."""
    given = [f"{field}={value}" for field, value in shortcuts.items() if value is not None]
    if (folder := _run_folder(what)) is not None:
        plan = _read_plan(folder / "plan.json")[0]
        return _fitted(plan, read_question(str(folder / "recipe.yaml"), [*given, *settings]))
    if what and PLAN_FILE.search(what) and Path(what).name != "config.json":
        plan, tree = _read_plan(Path(what))
        return _fitted(plan, read_question(None, [*_plan_settings(tree, what), *given, *settings]))
    request = read_plan_request(what, shortcuts, settings)
    say_reference(request)
    question = replace(request.question, max_plans=1)
    _refuse_unknown(question)
    if not (found := best_plans(question).ranked):
        raise no_fit_error(nothing_fits(question))
    return SimulateRequest(question=question, plan=predicted(found[0].plan, question), cluster=question.cluster)


def refuse_endless_failures(request: SimulateRequest, mtbf_hours: float | None, days: float) -> None:
    """Raise if there would be more failures than can be simulated in minutes: the job would not make progress."""
    if mtbf_hours is None:
        return
    failures = 24 * days * request.plan.mesh.world_size / mtbf_hours
    if failures > MAX_FAILURES:
        least = mtbf_hours * failures / MAX_FAILURES
        raise UserError("P084", f"{failures:,.0f} failures in {days:g} days are too many to simulate",
                        where="--mtbf", fix=f"name at least {least:.2g} hours for one GPU, or fewer days")  # fmt: skip


def _run_folder(what: str | None) -> Path | None:
    """Return the folder with plan.json and recipe.yaml that `what` names: a run, by path or name, or its plan."""
    if not what:
        return None
    path = Path(what)
    folders = (path, path.parent) if path.name == "plan.json" else (path, RUNS / what)
    return next((each for each in folders if (each / "plan.json").is_file() and (each / "recipe.yaml").is_file()), None)


def _read_plan(path: Path) -> tuple[Plan, dict[str, Any]]:
    try:
        tree = load_json(read_regular_text(path))
        return Plan.model_validate(tree["plan"]), tree
    except OSError as error:
        raise UserError("P080", f"the plan cannot be read: {error.strerror}", where=str(path), fix=PLAN_FIX) from None
    except TextError as error:
        raise UserError("P080", f"this is not JSON: {error.what}", where=str(path), fix=PLAN_FIX) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise UserError("P080", f"this is not a plan: {what}", where=str(path), fix=PLAN_FIX) from None
    except (KeyError, TypeError):
        raise UserError("P080", "this file has no plan", where=str(path), fix=PLAN_FIX) from None


def _plan_settings(tree: Mapping[str, Any], where: str) -> list[str]:
    """Return the recipe that `trimaran plan --json` answered: its model, if that is a preset, length and cluster."""
    model = tree.get("model")
    name = model.get("name") if isinstance(model, Mapping) else None
    if name not in PRESETS:
        raise UserError("P080", "the file does not say which model its plan is for", where=where,
                        fix="put its recipe.yaml beside plan.json, as in a run")  # fmt: skip
    fields = {"model.preset": name, "data.seq_len": tree.get("seq_len"), "cluster": tree.get("cluster")}
    return [f"{field}={value}" for field, value in fields.items() if value]


def _fitted(plan: Plan, question: Question) -> SimulateRequest:
    """Return the plan on the cluster: as many copies of it as fit, and the other nodes as spares."""
    _refuse_unknown(question)
    refuse_mixed(question.cluster, "a simulation")
    cluster, world = question.cluster, plan.mesh.world_size
    copies = cluster.world_size // world
    if not copies:
        raise UserError("P081", f"the plan needs {world:,} devices, and {cluster} has {cluster.world_size:,}",
                        where="--cluster", fix="name a larger cluster, or a plan for this one")  # fmt: skip
    notes: tuple[str, ...] = ()
    if copies > 1:
        grown = copies * plan.mesh.dp_replicate
        more = {"mesh": plan.mesh.model_copy(update={"dp_replicate": grown})}
        rows = {"micro_batches": copies * plan.rows_by_rank} if plan.rows_by_rank else {}
        plan = plan.model_copy(update=more | rows)
        notes = (f"the plan is for {world:,} devices: {copies:,} copies of it train, with a batch of "
                 f"{plan.global_batch:,}",)  # fmt: skip
    nodes = -(-plan.mesh.world_size // cluster.devices_per_node)
    used = resized_cluster(cluster, nodes, min(cluster.devices_per_node, plan.mesh.world_size))
    spares = cluster.num_nodes - nodes
    return SimulateRequest(question=question, plan=plan, cluster=used, spares=spares or None, notes=notes)


def _refuse_unknown(question: Question) -> None:
    if question.outline is None:
        raise UserError("P082", "nothing is known about the shape of this model, so it cannot be simulated",
                        where="model", fix="name a preset, or a model whose config.json has its sizes")  # fmt: skip
