"""What a run measured beside the prediction: its last steps, its waits by axis, and which ranks are late."""

from trimaran.core import Plan, predicted_comm, show_bytes
from trimaran.core.plan import WORLD
from trimaran.ui.language import as_is, say
from trimaran.ui.viz.figures import Figure, Lines, Table, Unit, ValueSeries, plain_bars, show_duration
from trimaran.ui.viz.subject import RunMedians, Subject

MEASURES = {"busy_seconds": "computing", "data_seconds": "waiting for data", "wait_seconds": "waiting for other ranks"}


def error_text(predicted: float, measured: float) -> str:
    """Return how far the prediction is off, as `+12.0%`; nothing if nothing was measured."""
    return as_is(f"{predicted / measured - 1:+.1%}") if measured > 0 else as_is("")


def run_table(subject: Subject, run: RunMedians, *names: str) -> Table:
    values = {
        "time of a step": (float(subject.prediction.step_seconds), run.step_seconds, show_duration),
        "peak of a rank": (float(subject.prediction.peak_bytes), run.peak_bytes, show_bytes),
    }
    rows = []
    for name in names:
        predicted, measured, show = values[name]
        rows.append((say(name), as_is(show(predicted)), as_is(show(measured)), error_text(predicted, measured)))
    return Table(title="This run", columns=("", "predicted", "measured", "error"), rows=tuple(rows))


def predicted_waits(subject: Subject) -> dict[str, float]:
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
        shares = {say("rank {rank}", rank=rank): run.slowest[rank] / total for rank in sorted(run.slowest)}
        found.append(
            plain_bars("How often each rank was the slowest", "fraction", "share of the measured steps", shares)
        )
    return found


def measured_lines(title: str, unit: Unit, run: RunMedians, values: tuple[float, ...], predicted: float) -> list[Lines]:
    """Return one value for each of the last steps, and the prediction as a limit; nothing for fewer than two steps."""
    if len(run.last.numbers) < 2:
        return []
    return [
        Lines(
            title=title,
            x_name="step number",
            x_unit="count",
            unit=unit,
            x=tuple(map(float, run.last.numbers)),
            series=(ValueSeries(name="measured", values=values),),
            limits={"predicted": float(predicted)},
        )
    ]


def peak_lines(run: RunMedians, predicted: float) -> list[Lines]:
    return measured_lines("Peak memory over the last steps", "bytes", run, run.last.peak_bytes, predicted)


def comm_lines(run: RunMedians, predicted: float) -> list[Lines]:
    return measured_lines("Exposed communication over the last steps", "seconds", run, run.last.comm, predicted)
