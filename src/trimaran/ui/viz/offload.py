"""Offload: what is copied between device and host in a step, how long that takes, and what it costs and saves."""

from dataclasses import replace

from trimaran.core import UserError, show_bytes
from trimaran.machine import Cluster
from trimaran.planner import check_plan
from trimaran.ui.language import as_is, say
from trimaran.ui.viz.figures import Formula, Mode, ModeName, Table, as_modes, show_duration, stacked_bars
from trimaran.ui.viz.subject import Controls, RunMedians, Subject, run_table

NAME = "DeepSpeedOffloadFlow"
TITLE = "Offload to the host"
QUESTION = "What does each kind of offload copy, does computing hide it, and how much memory does it save?"
KINDS = ("none", "optimizer", "activations", "parameters")
MOVES = {
    "none": "nothing",
    "optimizer": "optimizer states, to the device and back in each update",
    "activations": "saved activations, to the host in forward and back in backward",
    "parameters": "shards of weights and gradients; the host updates them",
}


def modes_of(subject: Subject, controls: Controls) -> dict[ModeName, Mode]:
    usual = subject.cluster.device.pcie_bandwidth / 1e9 or 0.1
    pcie = 1e9 * controls.number("pcie", "GB/s of PCIe in one direction", usual, least=0.1, most=1e4, log=True)
    host = subject.cluster.host_bandwidth / 1e9
    memory = 1e9 * controls.number("host", "GB/s of a node's host memory", host, least=0.1, most=1e5, log=True)
    usual_rows = subject.plan.micro_batch
    rows = controls.whole("micro_batch", "sequences at once on one device", usual_rows, least=1, most=4096, log=True)
    device = replace(subject.cluster.device, pcie_bandwidth=pcie)
    cluster = replace(subject.cluster, device=device, host_bandwidth=memory)
    plan = subject.plan
    if rows != plan.micro_batch:
        plan = plan.model_copy(update={"micro_batch": rows, "prediction": None})
    changed = replace(subject, plan=plan)
    live = _live(subject, subject.run) if subject.run is not None else None
    owned = changed.job.outline.trained_parameters / changed.plan.mesh.world_size
    states = changed.job.state_bytes * owned
    held = as_is(f"{owned:,.0f} x {changed.job.state_bytes:g} B")
    copied = as_is(f"{show_bytes(states)} / {pcie / 1e9:.3g} GB/s")
    formulas = (
        Formula("optimizer states of a rank", "parameters / ranks x bytes", held, states, "bytes"),
        Formula("time to copy them in one direction", "bytes / bandwidth", copied, states / pcie, "seconds"),
    )
    moved = tuple((as_is(kind), moves) for kind, moves in MOVES.items())
    table = Table("What is copied", ("offload", "copies"), moved)
    explained = Mode(formulas=formulas, figures=(table,))
    return as_modes(explained, _simulate(changed, cluster), live)


def _simulate(subject: Subject, cluster: Cluster) -> Mode:
    predictions, question = {}, subject.question
    for kind in KINDS:
        plan = subject.plan.model_copy(update={"offload": kind, "prediction": None})
        try:
            check_plan(plan, question.recipe, question.spec, subject.cluster, question.outline)
        except UserError:
            continue
        predictions[kind] = subject.predict(plan, cluster)
    if len(predictions) < 2:
        return Mode(sentences=("This plan cannot offload anything.",))
    base = float(predictions["none"].step_seconds) if "none" in predictions else 0.0
    said = [
        say("Offload of {kind}: a step takes {times:.2f} times as long, and a device needs {saved} less.",
            kind=say(kind), times=each.step_seconds / base,
            saved=show_bytes(max(0, predictions["none"].device_bytes - each.device_bytes)))
        for kind, each in predictions.items()
        if kind != "none" and base
    ]  # fmt: skip
    seconds = stacked_bars("Time of a step", "seconds", {kind: each.time for kind, each in predictions.items()})
    needed = {kind: {"needed": each.device_bytes} for kind, each in predictions.items()}
    limits: dict[str, float] = {as_is(cluster.device.name): float(cluster.device.memory_bytes)}
    memory = stacked_bars("Memory of a device", "bytes", needed, limits)
    held = {kind: {"pinned": each.host_bytes} for kind, each in predictions.items()}
    pinned = stacked_bars("Pinned memory of a host", "bytes", held, {"host": float(cluster.host_bytes)})
    return Mode(sentences=tuple(said), figures=(seconds, memory, pinned))


def _live(subject: Subject, run: RunMedians) -> Mode:
    if subject.plan.offload == "none":
        return Mode(sentences=("This run offloads nothing. Start one that does with `--set plan.offload=optimizer`.",))
    without = subject.predict(subject.plan.model_copy(update={"offload": "none", "prediction": None}))
    said = say("Without offload, a step is predicted to take {seconds} and {memory} of a device.",
               seconds=show_duration(without.step_seconds), memory=show_bytes(without.device_bytes))  # fmt: skip
    return Mode(sentences=(said,), figures=(run_table(subject, run, "time of a step", "peak of a rank"),))
