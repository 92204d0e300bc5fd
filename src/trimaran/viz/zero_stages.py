"""ZeRO's stages: what each data rank holds, what is sent in a step, and what our trainer needs with each."""

from collections.abc import Sequence

from trimaran.core import Plan, show_bytes, show_count
from trimaran.planner.memory_ladder import SHARDING_ORDER
from trimaran.viz.figures import Bars, Formula, Lines, Mode, ModeName, Table, ValueSeries, stacked_bars
from trimaran.viz.subject import Controls, Subject

NAME = "DeepSpeedZeROStages"
TITLE = "ZeRO stages 0 to 3"
QUESTION = "What does each stage save on every rank, and what does it cost in communication?"
# Of a parameter in mixed precision with Adam: 16-bit weight, 16-bit gradient, and fp32 weight with two moments.
WEIGHT_BYTES, GRADIENT_BYTES, STATE_BYTES = 2, 2, 12
PARTS = ("weights", "gradients", "optimizer states")
STAGES = ("stage 0", "stage 1", "stage 2", "stage 3")
MAX_RANKS = 1024


def bytes_of(stage: int, parameters: float, ranks: int) -> tuple[float, float, float]:
    """Return what one of `ranks` data ranks holds of the weights, the gradients and the optimizer states."""
    return (
        WEIGHT_BYTES * parameters / (ranks if stage >= 3 else 1),
        GRADIENT_BYTES * parameters / (ranks if stage >= 2 else 1),
        STATE_BYTES * parameters / (ranks if stage >= 1 else 1),
    )


def sent_bytes(stage: int, parameters: float, ranks: int) -> float:
    """Return what a rank sends in a step with one micro-batch: reduced gradients, and gathered weights.

    An all-reduce is a reduce-scatter and an all-gather. Stage 3 gathers the weights for forward and for backward.
    """
    rounds = 3 if stage >= 3 else 2
    return rounds * WEIGHT_BYTES * parameters * (ranks - 1) / ranks


def modes_of(subject: Subject, controls: Controls) -> dict[ModeName, Mode]:
    """Return the modes: the usual arithmetic, our trainer by the cost model, and what a run measured."""
    ranks = controls.whole("ranks", "data ranks", max(2, subject.plan.mesh.dp), least=1, most=MAX_RANKS)
    billions = subject.job.outline.num_parameters / 1e9
    parameters = 1e9 * controls.number("parameters", "billions of parameters", billions, least=1e-6, most=1e5)
    modes: dict[ModeName, Mode] = {
        "explain": _explain(parameters, ranks, float(subject.cluster.device.memory_bytes)),
        "simulate": _simulate(subject),
    }
    if subject.run is not None:
        modes["live"] = _live(subject)
    return modes


def _explain(parameters: float, ranks: int, limit: float) -> Mode:
    held = [bytes_of(stage, parameters, ranks) for stage in range(4)]
    symbols = ("2P + 2P + 12P", "2P + 2P + 12P/N", "2P + (2P + 12P)/N", "(2P + 2P + 12P)/N")
    formulas = [
        Formula(
            name=STAGES[stage],
            symbols=symbols[stage],
            numbers=f"P = {show_count(parameters)}, N = {ranks}",
            value=sum(held[stage]),
            unit="bytes",
        )
        for stage in range(4)
    ]
    bars = Bars(
        title=f"What each of {ranks} ranks holds",
        unit="bytes",
        categories=STAGES,
        series=tuple(ValueSeries(name=part, values=tuple(each[at] for each in held)) for at, part in enumerate(PARTS)),
        limits={"device": limit},
    )
    numbers = [2**power for power in range(11)]
    lines = Lines(
        title="By the number of data ranks",
        x_name="data ranks",
        x_unit="count",
        unit="bytes",
        x=tuple(map(float, numbers)),
        series=tuple(
            ValueSeries(name=STAGES[stage], values=tuple(sum(bytes_of(stage, parameters, each)) for each in numbers))
            for stage in range(4)
        ),
        log_x=True,
        log_y=True,
    )
    rows = tuple((STAGES[stage], show_bytes(sent_bytes(stage, parameters, ranks))) for stage in range(4))
    table = Table(title="Sent by each rank in a step", columns=("", "bytes"), rows=rows)
    sentences = (
        "Stages 1 and 2 send as much as plain data parallelism: an all-reduce is a reduce-scatter and an all-gather.",
        "Stage 3 gathers the weights once more, for backward: half as much again.",
    )
    return Mode(sentences=sentences, formulas=tuple(formulas), figures=(bars, lines, table))


def _stage_plans(subject: Subject) -> Sequence[tuple[str, Plan]]:
    """Return the subject's plan with each stage, if it has data ranks to shard over."""
    plan, mesh = subject.plan, subject.plan.mesh
    if mesh.dp == 1 or plan.engine != "torch":
        return ()
    whole = mesh.model_copy(update={"dp_replicate": mesh.dp, "dp_shard": 1})
    split = mesh.model_copy(update={"dp_replicate": 1, "dp_shard": mesh.dp})
    meshes = {"none": whole}
    fields = plan.model_dump(exclude={"prediction", "mesh", "sharding", "offload", "towers"})
    return [
        (STAGES[number], Plan(**fields, mesh=meshes.get(sharding, split), sharding=sharding))
        for number, sharding in enumerate(SHARDING_ORDER)
    ]


def _simulate(subject: Subject) -> Mode:
    plans = _stage_plans(subject)
    if not plans:
        return Mode(sentences=("The plan has a single data rank: there is nothing to shard.",))
    predictions = {name: subject.predict(plan) for name, plan in plans}
    memory = {name: each.memory for name, each in predictions.items()}
    limits = {subject.cluster.device.name: float(subject.cluster.device.memory_bytes)}
    bars = stacked_bars("Peak memory of a rank in our trainer", "bytes", memory, limits)
    seconds = stacked_bars("Time of a step", "seconds", {name: each.time for name, each in predictions.items()})
    now = SHARDING_ORDER.index(subject.plan.sharding)
    return Mode(
        sentences=(f"The plan uses {STAGES[now]} (`sharding: {subject.plan.sharding}`).",), figures=(bars, seconds)
    )


def _live(subject: Subject) -> Mode:
    run, prediction = subject.run, subject.prediction
    assert run is not None
    rows = (
        ("peak of a rank", show_bytes(prediction.peak_bytes), show_bytes(run.peak_bytes)),
        ("step", f"{prediction.step_seconds:.4g} s", f"{run.step_seconds:.4g} s"),
    )
    return Mode(figures=(Table(title="This run", columns=("", "predicted", "measured"), rows=rows),))
