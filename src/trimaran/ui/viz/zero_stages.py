"""ZeRO's stages: what each data rank holds, what is sent in a step, and what our trainer needs with each."""

import math
from typing import NamedTuple

from trimaran.core import SHARDINGS, Plan, show_bytes, show_count
from trimaran.ui.language import as_is, say
from trimaran.ui.viz.figures import Formula, Lines, Mode, ModeName, Table, ValueSeries, as_modes, stacked_bars
from trimaran.ui.viz.subject import Controls, RunMedians, Subject, run_table

NAME = "DeepSpeedZeROStages"
TITLE = "ZeRO stages 0 to 3"
QUESTION = "What does each stage save on every rank, and what does it cost in communication?"
PARTS = ("weights", "gradients", "optimizer states")
STAGES = ("stage 0", "stage 1", "stage 2", "stage 3")
MAX_RANKS = 1024


class StateBytes(NamedTuple):
    """Bytes of a parameter: its weight, its gradient, and what the optimizer keeps."""

    weight: float = 2
    gradient: float = 2
    states: float = 12


MIXED = StateBytes()  # 16-bit weight and gradient; fp32 weight and Adam's two moments
OPTIMIZERS = {"adam": 8.0, "adam-8bit": 2.0, "sgd-momentum": 4.0, "sgd": 0.0}  # bytes of a parameter's moments
PRECISIONS = ("mixed", "fp32")


def bytes_of(stage: int, parameters: float, ranks: int, each: StateBytes = MIXED) -> tuple[float, float, float]:
    """Return what one of `ranks` data ranks holds of the weights, the gradients and the optimizer states."""
    return (
        each.weight * parameters / (ranks if stage >= 3 else 1),
        each.gradient * parameters / (ranks if stage >= 2 else 1),
        each.states * parameters / (ranks if stage >= 1 else 1),
    )


def sent_bytes(stage: int, parameters: float, ranks: int, each: StateBytes = MIXED) -> float:
    """Return what a rank sends in a step with one micro-batch: reduced gradients, and gathered weights.

    An all-reduce is a reduce-scatter and an all-gather. Stage 3 gathers the weights for forward and for backward.
    """
    rounds = 3 if stage >= 3 else 2
    return rounds * each.weight * parameters * (ranks - 1) / ranks


def least_ranks(stage: int, parameters: float, memory: float, each: StateBytes = MIXED) -> int | None:
    """Return the smallest number of data ranks with which a stage fits into `memory` bytes; None if none does."""
    whole = sum(bytes_of(stage, parameters, 1, each)[: 3 - stage])
    shared = sum(bytes_of(stage, parameters, 1, each)[3 - stage :])
    if whole + shared <= memory:
        return 1
    return math.ceil(shared / (memory - whole)) if memory > whole and stage else None


def modes_of(subject: Subject, controls: Controls) -> dict[ModeName, Mode]:
    ranks = controls.whole("ranks", "data ranks", max(2, subject.plan.mesh.dp), least=1, most=MAX_RANKS, log=True)
    billions = subject.job.outline.num_parameters / 1e9
    parameters = 1e9 * controls.number("parameters", "billions of parameters", billions, least=1e-6, most=1e5, log=True)
    precision = controls.choice("precision", "precision of weights and gradients", "mixed", PRECISIONS)
    optimizer = controls.choice("optimizer", "optimizer", "adam", tuple(OPTIMIZERS))
    moments = OPTIMIZERS[optimizer]
    each = StateBytes(2, 2, 4 + moments) if precision == "mixed" else StateBytes(4, 4, moments)
    device, limit = subject.cluster.device.name, float(subject.cluster.device.memory_bytes)
    held = [bytes_of(stage, parameters, ranks, each) for stage in range(4)]
    weight, gradient, states = (f"{size:g}P" for size in each)
    symbols = (f"{weight} + {gradient} + {states}", f"{weight} + {gradient} + {states}/N",
               f"{weight} + ({gradient} + {states})/N", f"({weight} + {gradient} + {states})/N")  # fmt: skip
    numbers = as_is(f"P = {show_count(parameters)}, N = {ranks}")
    formulas = [Formula(STAGES[stage], as_is(symbols[stage]), numbers, sum(held[stage]), "bytes") for stage in range(4)]
    title, limits = say("What each of {ranks} ranks holds", ranks=ranks), {as_is(device): limit}
    parts = {stage: dict(zip(PARTS, row, strict=True)) for stage, row in zip(STAGES, held, strict=True)}
    bars, counts = stacked_bars(title, "bytes", parts, limits), [2**power for power in range(11)]
    series = tuple(
        ValueSeries(name, tuple(sum(bytes_of(stage, parameters, num, each)) for num in counts))
        for stage, name in enumerate(STAGES)
    )
    title, x = "What a rank holds, by the number of data ranks", tuple(map(float, counts))
    lines = Lines(title=title, x_name="data ranks", x_unit="count", unit="bytes", x=x, series=series, log_x=True,
                  log_y=True, limits=limits)  # fmt: skip
    fits = [least_ranks(stage, parameters, limit, each) for stage in range(4)]
    rows = tuple((STAGES[stage], as_is(show_bytes(sent_bytes(stage, parameters, ranks, each))),
                  say("never") if least is None else say("{ranks:,} ranks", ranks=least))
                 for stage, least in enumerate(fits))  # fmt: skip
    columns = ("", "sent by each rank in a step", "fits a device from")
    table = Table("What it costs, and from how many ranks on it fits", columns, rows)
    sentences = (
        "Stages 1 and 2 send as much as plain data parallelism: an all-reduce is a reduce-scatter and an all-gather.",
        "Stage 3 gathers the weights once more, for backward: half as much again.",
    )
    explained = Mode(sentences=sentences, formulas=tuple(formulas), figures=(bars, lines, table))
    live = _live(subject, subject.run) if subject.run is not None else None
    return as_modes(explained, _simulate(subject), live)


def _simulate(subject: Subject) -> Mode:
    plan, mesh = subject.plan, subject.plan.mesh
    if mesh.dp == 1 or not plan.engine_traits.uses_fsdp:
        return Mode(sentences=("The plan has a single data rank: there is nothing to shard.",))
    whole = mesh.model_copy(update={"dp_replicate": mesh.dp, "dp_shard": 1})
    split = mesh.model_copy(update={"dp_replicate": 1, "dp_shard": mesh.dp})
    fields, predictions = plan.model_dump(exclude={"prediction", "mesh", "sharding", "offload", "towers"}), {}
    for name, sharding in zip(STAGES, SHARDINGS, strict=True):
        staged = Plan(**fields, mesh=whole if sharding == "none" else split, sharding=sharding)
        predictions[name] = subject.predict(staged)
    memory = {name: each.memory for name, each in predictions.items()}
    limits = {as_is(subject.cluster.device.name): float(subject.cluster.device.memory_bytes)}
    bars = stacked_bars("Peak memory of a rank in our trainer", "bytes", memory, limits)
    seconds = stacked_bars("Time of a step", "seconds", {name: each.time for name, each in predictions.items()})
    stage = say(STAGES[SHARDINGS.index(plan.sharding)])
    uses = say("The plan uses {stage} (`sharding: {sharding}`).", stage=stage, sharding=plan.sharding)
    return Mode(sentences=(uses,), figures=(bars, seconds))


def _live(subject: Subject, run: RunMedians) -> Mode:
    now = SHARDINGS.index(subject.plan.sharding)
    said = say("The run uses {stage} (`sharding: {sharding}`). Only the stage of a run can be measured: start another "
               "one with `--set plan.sharding=...` to compare.", stage=say(STAGES[now]),
               sharding=subject.plan.sharding)  # fmt: skip
    return Mode(sentences=(said,), figures=(run_table(subject, run, "peak of a rank", "time of a step"),))
