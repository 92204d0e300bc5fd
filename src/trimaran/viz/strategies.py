"""All kinds of plans side by side: step time against memory, and why each loser loses."""

from dataclasses import replace

from trimaran.core import Plan, show_bytes, show_seconds
from trimaran.planner import search
from trimaran.viz.figures import Mode, ModeName, Point, Scatter, Table
from trimaran.viz.subject import Controls, Subject

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


def modes_of(subject: Subject, controls: Controls) -> dict[ModeName, Mode]:
    """Return the modes: the best plan of each mesh, and the plans that lost with the reason."""
    count = controls.whole("plans", "plans to show", 12, least=1, most=64)
    return {"explain": _explain(), "simulate": _simulate(subject, count)}


def _explain() -> Mode:
    table = Table(title="What each way splits", columns=("", "splits", "saves", "costs"), rows=WAYS)
    return Mode(sentences=("Degrees multiply: their product is the number of ranks.",), figures=(table,))


def _simulate(subject: Subject, count: int) -> Mode:
    question = replace(subject.question, max_plans=count)
    answer = search(question)
    known = {str(plan): plan for plan in answer.ranked} | {str(each.plan): each.plan for each in answer.misses}
    reasons = {str(each.plan): each.why for each in (*answer.misses, *answer.ties)}
    if answer.ranked:
        reasons[str(answer.ranked[0])] = "chosen"
    rows = [(plan, reasons.get(name, "")) for name, plan in known.items()]
    points = tuple(_point(plan, why) for plan, why in rows)
    scatter = Scatter(
        title="Step time against memory",
        x_name="memory of a device",
        x_unit="bytes",
        y_name="step",
        y_unit="seconds",
        points=points,
        x_limit=float(answer.cluster.device.memory_bytes),
    )
    table = Table(
        title="Plans",
        columns=("plan", "step", "memory", "tokens/s", "why not"),
        rows=tuple(_row(plan, why) for plan, why in rows),
    )
    sentences = (f"{answer.num_considered:,} plans were priced.", *answer.hints)
    return Mode(sentences=sentences, figures=(scatter, table))


def _point(plan: Plan, why: str) -> Point:
    prediction = plan.prediction
    assert prediction is not None, "the planner predicts what it returns"
    kind = "chosen" if why == "chosen" else "fits" if prediction.fits else "does not fit"
    return Point(
        name=str(plan), x=float(prediction.device_bytes), y=float(prediction.step_seconds), kind=kind, note=why
    )


def _row(plan: Plan, why: str) -> tuple[str, ...]:
    prediction = plan.prediction
    assert prediction is not None
    return (str(plan), show_seconds(prediction.step_seconds), show_bytes(prediction.device_bytes),
            f"{prediction.tokens_per_second:,.0f}", why)  # fmt: skip
