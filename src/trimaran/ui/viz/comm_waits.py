"""How long a run waits for communication by axis, beside the prediction, and which ranks are late."""

from trimaran.core import Plan
from trimaran.core.plan import WORLD, predicted_comm
from trimaran.ui.viz.figures import Bars, Figure, Table, ValueSeries
from trimaran.ui.viz.show_values import show_duration
from trimaran.ui.viz.subject import RunMedians, Subject
from trimaran.ui.viz.texts import as_is, say

MEASURES = {
    "busy_seconds": "computing",
    "data_seconds": "waiting for data",
    "wait_seconds": "waiting for other ranks",
}


def error_text(predicted: float, measured: float) -> str:
    """Return how far the prediction is off, as `+12.0%`; nothing if nothing was measured."""
    return as_is(f"{predicted / measured - 1:+.1%}") if measured > 0 else as_is("")


def predicted_waits(subject: Subject) -> dict[str, float]:
    """Return the predicted seconds of a step that a rank waits, by axis."""
    plan: Plan = subject.plan.model_copy(update={"prediction": subject.prediction})
    return predicted_comm(plan)


def waits_table(subject: Subject, run: RunMedians, axes: tuple[str, ...] = ()) -> Table:
    """Return what rank 0 waits for each axis in a step, measured and predicted; with `axes`, only for those."""
    expected = predicted_waits(subject)
    rows = [
        (
            say("all ranks") if axis == WORLD else as_is(axis),
            as_is(show_duration(expected.get(axis, 0.0))),
            as_is(show_duration(measured)),
            error_text(expected.get(axis, 0.0), measured),
        )
        for axis, measured in run.comm_seconds.items()
        if not axes or axis in axes
    ]
    return Table(title="Waits of rank 0 in a step, by axis", columns=("axis", "predicted", "measured", "error"),
                 rows=tuple(rows))  # fmt: skip


def late_ranks(run: RunMedians) -> list[Figure]:
    """Return how unequal the ranks are, and which were the slowest; nothing for a single rank."""
    found: list[Figure] = []
    rows = [
        (say(name), *(as_is(show_duration(each)) for each in spread[:3]), as_is(spread.at))
        for measure, name in MEASURES.items()
        if (spread := run.ranks.get(measure)) is not None
    ]
    if rows:
        found.append(Table(title="Ranks compared", columns=("", "least", "median", "most", "rank with the most"),
                           rows=tuple(rows)))  # fmt: skip
    if total := sum(run.slowest.values()):
        ranks = sorted(run.slowest)
        shares = tuple(run.slowest[rank] / total for rank in ranks)
        found.append(
            Bars(
                title="How often each rank was the slowest",
                unit="fraction",
                categories=tuple(say("rank {rank}", rank=rank) for rank in ranks),
                series=(ValueSeries(name="share of the measured steps", values=shares),),
            )
        )
    return found
