"""Offload: what is copied between device and host in a step, how long that takes, and what it costs and saves."""

from trimaran.core import Plan, UserError, show_bytes
from trimaran.planner import check_plan
from trimaran.viz.figures import Formula, Mode, ModeName, Table, stacked_bars
from trimaran.viz.subject import Controls, Subject

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
    """Return the modes: the time to copy states over PCIe, and the plan with each kind of offload."""
    cluster = subject.cluster
    usual = cluster.device.pcie_bandwidth / 1e9
    bandwidth = 1e9 * controls.number("pcie", "GB/s of PCIe in one direction", usual, least=0.1, most=1e4)
    return {"explain": _explain(subject, bandwidth), "simulate": _simulate(subject)}


def plans_by_offload(subject: Subject) -> dict[str, Plan]:
    """Return the subject's plan with each kind of offload that is legal for it."""
    found, question = {}, subject.question
    for kind in KINDS:
        plan = subject.plan.model_copy(update={"offload": kind, "prediction": None})
        try:
            check_plan(plan, question.recipe, question.spec, subject.cluster, question.outline)
        except UserError:
            continue
        found[kind] = plan
    return found


def _explain(subject: Subject, bandwidth: float) -> Mode:
    owned = subject.job.outline.trained_parameters / subject.plan.mesh.world_size
    states = subject.job.state_bytes * owned
    formulas = (
        Formula(
            name="optimizer states of a rank",
            symbols="parameters / ranks x bytes",
            numbers=f"{owned:,.0f} x {subject.job.state_bytes:g} B",
            value=states,
            unit="bytes",
        ),
        Formula(
            name="copied in one direction",
            symbols="bytes / bandwidth",
            numbers=f"{show_bytes(states)} / {bandwidth / 1e9:.0f} GB/s",
            value=states / bandwidth,
            unit="seconds",
        ),
    )
    table = Table(title="What is copied", columns=("offload", "copies"), rows=tuple(MOVES.items()))
    return Mode(formulas=formulas, figures=(table,))


def _simulate(subject: Subject) -> Mode:
    predictions = {kind: subject.predict(plan) for kind, plan in plans_by_offload(subject).items()}
    if len(predictions) < 2:
        return Mode(sentences=("This plan cannot offload anything.",))
    seconds = stacked_bars("Time of a step", "seconds", {kind: each.time for kind, each in predictions.items()})
    needed = {kind: {"needed": each.device_bytes} for kind, each in predictions.items()}
    limits = {subject.cluster.device.name: float(subject.cluster.device.memory_bytes)}
    memory = stacked_bars("Memory of a device", "bytes", needed, limits)
    held = {kind: {"pinned": each.host_bytes} for kind, each in predictions.items()}
    pinned = stacked_bars("Pinned memory of a host", "bytes", held, {"host": float(subject.cluster.host_bytes)})
    return Mode(figures=(seconds, memory, pinned))
