"""All kinds of plans side by side: step time against memory, and why each loser loses."""

from dataclasses import replace

from trimaran.core import Mesh, Plan, UserError, show_bytes
from trimaran.planner import GOALS, PlanAnswer, search
from trimaran.ui.language import as_is, say
from trimaran.ui.viz.figures import Mode, ModeName, Point, Scatter, Table, as_modes, show_duration
from trimaran.ui.viz.subject import Controls, RunMedians, Subject

NAME = "ParallelismStrategyComparison"
TITLE = "Which plan, and why not the others?"
QUESTION = "How fast is each way to split this model, how much memory does it need, and why do the losers lose?"

WAYS = (
    ("dp_replicate (DDP)", "the batch", "nothing", "an all-reduce of the gradients in each step"),
    ("dp_shard (FSDP, ZeRO)", "the batch, and states, gradients or weights", "states, gradients, weights",
     "gathers and reductions of each layer"),
    ("tp", "every matrix", "weights and activations", "four exchanges of activations in each layer"),
    ("pp", "the layers", "weights and states", "a bubble, and messages between stages"),
    ("cp", "every sequence", "activations", "an exchange of keys and values in each layer"),
    ("ep", "the experts", "weights and states of experts", "each token is sent to its experts and back"),
)  # fmt: skip
LOCKED = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
LABELS = {"dp_replicate": "replicas", "dp_shard": "shards", "tp": "ranks that split each matrix",
          "pp": "pipeline stages", "cp": "parts of a sequence"}  # fmt: skip
FREE = "any"
CHOSEN = "chosen"
COLORS = {CHOSEN: 0, "fits": 8, "does not fit": 5, "this run, predicted": 3, "this run, measured": 1}


def modes_of(subject: Subject, controls: Controls) -> dict[ModeName, Mode]:
    goal = controls.choice("goal", "what counts", subject.question.goal, GOALS)
    world = subject.cluster.world_size
    possible = (FREE, *(str(each) for each in range(1, min(world, 1024) + 1) if world % each == 0))
    locked = {axis: controls.choice(axis, LABELS[axis], FREE, possible) for axis in LOCKED}
    count = controls.whole("plans", "plans to show", 8, least=1, most=32)
    question = replace(subject.question, max_plans=count, goal=next(each for each in GOALS if each == goal))
    degrees = {axis: int(degree) for axis, degree in locked.items() if degree != FREE}
    asked = (goal, count, *sorted(degrees.items()))
    if asked not in subject.kept:  # the planner's answer with these degrees pinned; its refusal, if no plan has them
        if degrees:
            pins = question.pins
            mesh = Mesh.model_validate(pins.mesh.model_dump(include=pins.mesh.model_fields_set) | degrees)
            fields = {name: getattr(pins, name) for name in pins.model_fields_set}
            pinned = Plan.model_validate(fields | {"mesh": mesh})
            question = replace(question, recipe=question.recipe.model_copy(update={"plan": pinned}))
        try:
            subject.kept[asked] = search(question)
        except UserError as error:
            subject.kept[asked] = error
    answer = subject.kept[asked]
    ways = tuple((as_is(name), *rest) for name, *rest in WAYS)
    table = Table("What each way splits", ("", "splits", "saves", "costs"), ways)
    explained = Mode(sentences=("Degrees multiply: their product is the number of ranks.",), figures=(table,))
    live = _live(subject, subject.run, answer) if subject.run is not None else None
    return as_modes(explained, _simulate(answer), live)


def _simulate(answer: PlanAnswer | UserError) -> Mode:
    if isinstance(answer, UserError):
        return Mode(sentences=(say("No plan has these degrees: {why}.", why=answer.what),))
    rows = _plans(answer)
    points = tuple(_point(plan, why) for plan, why in rows)
    scatter = _scatter(answer, points)
    table = Table("Plans", ("plan", "step", "memory", "tokens/s", "why not"), tuple(
            (as_is(plan), as_is(show_duration(point.y)), as_is(show_bytes(point.x)),
             as_is(f"{plan.prediction.tokens_per_second:,.0f}" if plan.prediction else ""), why)
            for (plan, why), point in zip(rows, points, strict=True)
        ))  # fmt: skip
    considered = say("{count:,} plans were priced.", count=answer.num_considered)
    sentences = (considered, *(say("Would help: {hint}.", hint=hint) for hint in answer.hints))
    return Mode(sentences=sentences, figures=(scatter, table))


def _plans(answer: PlanAnswer) -> list[tuple[Plan, str]]:
    known = {str(plan): plan for plan in answer.ranked} | {str(each.plan): each.plan for each in answer.misses}
    reasons: dict[str, str] = {str(each.plan): each.why for each in (*answer.misses, *answer.ties)}
    if answer.ranked:
        reasons[str(answer.ranked[0])] = CHOSEN
    best = answer.ranked[0].prediction if answer.ranked else None
    fastest = best.step_seconds if best else 0.0
    found = []
    for name, plan in known.items():
        why, mine = reasons.get(name) or "", plan.prediction.step_seconds if plan.prediction else 0.0
        if not why and fastest and mine:
            why = say("{times:.2f} times as long", times=mine / fastest)
        found.append((plan, why))
    return found


def _scatter(answer: PlanAnswer, points: tuple[Point, ...]) -> Scatter:
    return Scatter(
        title="Step time against memory",
        x_name="memory of a device",
        x_unit="bytes",
        y_name="time of a step",
        y_unit="seconds",
        points=points,
        x_limit=float(answer.cluster.device.memory_bytes),
        limit_name=as_is(answer.cluster.device.name),
        colors=COLORS,
    )


def _live(subject: Subject, run: RunMedians, answer: PlanAnswer | UserError) -> Mode:
    predicted = subject.prediction
    off = predicted.step_seconds / run.step_seconds - 1 if run.step_seconds else 0.0
    sentence = say("A step takes {measured}; the prediction is off by {error:+.1%}.",
                   measured=show_duration(run.step_seconds), error=off)  # fmt: skip
    if isinstance(answer, UserError):
        return Mode(sentences=(sentence,))
    others = [_point(plan, why) for plan, why in _plans(answer) if str(plan) != str(subject.plan)]
    own = (
        Point(name=as_is(run.name), x=float(predicted.device_bytes), y=float(predicted.step_seconds),
              kind="this run, predicted"),
        Point(name=as_is(run.name), x=run.peak_bytes, y=run.step_seconds, kind="this run, measured"),
    )  # fmt: skip
    return Mode(sentences=(sentence,), figures=(_scatter(answer, (*others, *own)),))


def _point(plan: Plan, why: str) -> Point:
    prediction = plan.prediction
    assert prediction is not None, "the planner predicts what it returns"
    kind = CHOSEN if why == CHOSEN else "fits" if prediction.fits else "does not fit"
    return Point(
        name=as_is(plan), x=float(prediction.device_bytes), y=float(prediction.step_seconds), kind=kind, note=why
    )
