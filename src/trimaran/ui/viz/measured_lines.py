"""What a run measured in each of its last steps, beside the prediction."""

from trimaran.ui.viz.figures import Lines, Unit, ValueSeries
from trimaran.ui.viz.subject import RunMedians


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
    """Return the peak memory of the last steps."""
    return measured_lines("Peak memory over the last steps", "bytes", run, run.last.peak_bytes, predicted)


def comm_lines(run: RunMedians, predicted: float) -> list[Lines]:
    """Return the exposed communication of the last steps."""
    return measured_lines("Exposed communication over the last steps", "seconds", run, run.last.comm, predicted)
