"""The answer of `trimaran simulate`: the plan and the cluster that are simulated, and how the job is shown."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimaran.app.plan.plan_view import add_model, facts_table
from trimaran.app.recipe.options import RUNS
from trimaran.app.recipe.plan_request import read_plan_request, say_reference
from trimaran.app.recipe.request import read_question
from trimaran.app.show.clean_console import plain_table
from trimaran.app.show.text_chart import GREEN
from trimaran.core import Plan, TextError, UserError, load_json, read_regular_text, show_count, show_seconds
from trimaran.cost import ACTIVITIES, NODE_DISK_BANDWIDTH, Simulation, Worth
from trimaran.machine import Cluster, refuse_mixed
from trimaran.models import PRESETS
from trimaran.planner import Question, best_plans, no_fit_error, nothing_fits, predicted, resized_cluster

PLAN_FILE = re.compile(r"\.json$")
PLAN_FIX = "name a run, its plan.json, a file of `trimaran plan --json`, a recipe or a model"
MAX_SHOWN_CAUSES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateRequest:
    """A plan, the part of the cluster that trains, the spare nodes if known, and notes about changes to fit it."""

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
        model = tree.get("model")
        name = model.get("name") if isinstance(model, Mapping) else None
        if name not in PRESETS:
            raise UserError("P080.file-not-say", where=what)
        fields = {"model.preset": name, "data.seq_len": tree.get("seq_len"), "cluster": tree.get("cluster")}
        own = [f"{field}={value}" for field, value in fields.items() if value]
        return _fitted(plan, read_question(None, [*own, *given, *settings]))
    request = read_plan_request(what, shortcuts, settings)
    say_reference(request)
    question = replace(request.question, max_plans=1)
    _refuse_unknown(question)
    if not (found := best_plans(question).ranked):
        raise no_fit_error(nothing_fits(question))
    return SimulateRequest(question=question, plan=predicted(found[0].plan, question), cluster=question.cluster)


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
        what = f"the plan cannot be read: {error.strerror}"
    except TextError as error:
        what = f"this is not JSON: {error.what}"
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = f"this is not a plan: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (KeyError, TypeError):
        what = "this file has no plan"
    raise UserError("P080", what, where=str(path), fix=PLAN_FIX)


def _fitted(plan: Plan, question: Question) -> SimulateRequest:
    """Return the plan on the cluster: as many copies of it as fit, and the other nodes as spares."""
    _refuse_unknown(question)
    refuse_mixed(question.cluster, "a simulation")
    cluster, world = question.cluster, plan.mesh.world_size
    copies = cluster.world_size // world
    if not copies:
        raise UserError(
            "P081.plan-needs-devices", where="--cluster", world=world, cluster=cluster, world_size=cluster.world_size
        )
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
        raise UserError("P082.nothing-known-about", where="model")


def show_simulation(request: SimulateRequest, simulation: Simulation, console: Console) -> None:
    """Print the answer: the steps, the job, where its time goes, and what spares and checkpoints are worth."""
    facts, terms, sample = facts_table(), simulation.terms, simulation.sample
    facts.add_row("run", Text(request.question.recipe.name, style="bold"))
    add_model(facts, request.question.outline)
    facts.add_row("plan", str(simulation.plan))
    for note in request.notes:
        facts.add_row("note", note)
    facts.add_row("cluster", f"{simulation.cluster}, and {terms.spares:,} spare nodes")
    mfu = f", mfu {simulation.mfu:.1%}" if simulation.mfu else ""
    bubble = f"; the pipeline waits {simulation.step.bubble:.1%}" if simulation.plan.mesh.pp > 1 else ""
    facts.add_row("step", f"{show_seconds(sample.mean)} on average{mfu}; "
                  f"{show_seconds(simulation.step.seconds)} if all nodes were equal, "
                  f"99% below {show_seconds(sample.quantile(0.99))}{bubble}")  # fmt: skip
    facts.add_row("goodput", Text(f"{simulation.goodput:.1%} of {simulation.scenario.days:g} days", style="bold")
                  .append(f" (± {simulation.goodput_error:.1%}): {simulation.steps:,.0f} steps, "
                          f"{show_count(_tokens(request, simulation))} tokens", style="not bold"))  # fmt: skip
    counts = sum((Counter(each.by_cause) for each in simulation.histories), Counter[str]())
    runs = len(simulation.histories)
    shown = counts.most_common(MAX_SHOWN_CAUSES)
    causes = [f"{name} {count / runs:,.0f}" for name, count in shown]
    if rest := counts.total() - sum(count for _, count in shown):
        causes.append(f"others {rest / runs:,.0f}")
    often = f"{counts.total() / runs:,.0f}, one every {show_seconds(terms.mtbf)}"
    facts.add_row("failures", f"{often}: {', '.join(causes) or 'none'}")
    if simulation.mttr:
        facts.add_row("MTTR", f"{show_seconds(simulation.mttr)} from a failure to the first new step")
    facts.add_row("checkpoint", f"every {terms.save.every:,} steps ({show_seconds(terms.save.every * sample.mean)}): "
                  f"stops training for {show_seconds(terms.save.stall)}, complete after "
                  f"{show_seconds(terms.save.write)} more")  # fmt: skip
    scaled = "" if terms.failure_scale == 1 else f" x {terms.failure_scale:.3g}"
    facts.add_row("assumed", f"a restart takes {show_seconds(terms.restart)}, a repair {show_seconds(terms.repair)}; "
                  f"failures as in the Llama 3 run{scaled}; a node writes "
                  f"{NODE_DISK_BANDWIDTH / 1e9:g} GB/s; one node in {1 / terms.slow.per_node_second / 86400:,.0f} "
                  f"becomes {terms.slow.factor - 1:.0%} slower a day, until {show_seconds(terms.slow.seconds)} "
                  "later")  # fmt: skip
    console.print(facts)
    console.print(Text("\nwhere the time goes", style="bold"))
    activities = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    activities.add_column()
    activities.add_column(justify="right")
    for activity in ACTIVITIES:
        fraction = fmean(each.by_activity[activity] / each.seconds for each in simulation.histories)
        activities.add_row(activity, f"{fraction:.2%}")
    console.print(activities)
    console.print(Text("\nwhat a spare node is worth", style="bold"))
    spares = plain_table("spares", "goodput", "±", "per spare more", "as nodes that train")
    nodes = simulation.terms.num_devices / simulation.terms.devices_per_node
    for point, step in gains_of(simulation.spares):
        values = [f"{step:+.3%}", f"{step * nodes:+.2f}"] if step is not None else ["", ""]
        emphasis = f"bold {GREEN}" if point.value == simulation.terms.spares else ""
        spares.add_row(f"{point.value:,}", f"{point.goodput:.2%}", f"{point.error:.2%}", *values, style=emphasis)
    console.print(spares)
    console.print(Text("\nwhat the checkpoint interval is worth", style="bold"))
    table = plain_table("steps", "seconds", "goodput", "±")
    for worth in simulation.intervals:
        style = f"bold {GREEN}" if worth.value == simulation.terms.save.every else ""
        seconds = show_seconds(worth.value * simulation.sample.mean)
        table.add_row(f"{worth.value:,}", seconds, f"{worth.goodput:.2%}", f"{worth.error:.2%}", style=style)
    console.print(table)


def _tokens(request: SimulateRequest, simulation: Simulation) -> float:
    question = request.question
    assert question.outline is not None, "a model that is not known is refused"
    positions = question.outline.main.sample_positions(question.recipe.data.seq_len)[0]
    return simulation.steps * simulation.plan.global_batch * positions


def gains_of(worths: tuple[Worth, ...]) -> list[tuple[Worth, float | None]]:
    """Return each with the goodput that one more is worth, compared with the entry before; None for the first."""
    pairs = pairwise(worths)
    return [(worths[0], None), *((there, (there.goodput - here.goodput) / (there.value - here.value))
                                 for here, there in pairs)]  # fmt: skip


def simulation_as_dict(request: SimulateRequest, simulation: Simulation) -> dict[str, Any]:
    """Return what `--json` prints. Times are seconds, fractions are of the job's time."""
    sample, terms, histories = simulation.sample, simulation.terms, simulation.histories
    counts = sum((Counter(each.by_cause) for each in histories), Counter[str]())
    return {
        "name": request.question.recipe.name,
        "cluster": str(simulation.cluster),
        "plan": simulation.plan.model_dump(mode="json"),
        "notes": list(request.notes),
        "days": simulation.scenario.days,
        "seed": simulation.scenario.seed,
        "runs": simulation.scenario.runs,
        "step": {
            "equal_nodes": simulation.step.seconds, "mean": sample.mean,
            "quantiles": {f"{each:g}": sample.quantile(each) for each in (0.01, 0.1, 0.5, 0.9, 0.99)},
            "mfu": simulation.mfu or None, "bubble": simulation.step.bubble,
        },
        "goodput": simulation.goodput,
        "goodput_error": simulation.goodput_error,
        "steps": simulation.steps,
        "tokens": _tokens(request, simulation),
        "mttr": simulation.mttr,
        "mtbf": terms.mtbf,
        "failures": {name: count / len(histories) for name, count in counts.most_common()},
        "time": {name: fmean(each.by_activity[name] / each.seconds for each in histories) for name in ACTIVITIES},
        "checkpoint": {"steps": terms.save.every, "stall": terms.save.stall, "write": terms.save.write},
        "spares": terms.spares,
        "spares_worth": [each._asdict() | {"per_spare": gain} for each, gain in gains_of(simulation.spares)],
        "intervals_worth": [
            each._asdict() | {"seconds": each.value * sample.mean} for each in simulation.intervals
        ],
        "assumed": {
            "restart": terms.restart, "replace": terms.replace, "repair": terms.repair,
            "failure_scale": terms.failure_scale, "planned_per_day": terms.planned_per_second * 86400,
            "slow_node": {"days": 1 / terms.slow.per_node_second / 86400, "factor": terms.slow.factor,
                          "seconds": terms.slow.seconds},
            "node_jitter": simulation.scenario.jitter, "node_disk_bytes_per_second": NODE_DISK_BANDWIDTH,
        },
    }  # fmt: skip
