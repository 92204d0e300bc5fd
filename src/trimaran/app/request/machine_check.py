"""`trimaran doctor` without a run: this machine, or this allocation, looked at before money is spent."""

import json
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import psutil
import typer

from trimaran.app.request.options import RUNS
from trimaran.core import EXIT_DONE, EXIT_USER, Bytes, Plan, Recipe, Seconds, UserError
from trimaran.cost import STATE_BYTES
from trimaran.cost.goodput import checkpoint_bytes
from trimaran.doctor.checks.result import CheckResult
from trimaran.doctor.machine_facts import Work
from trimaran.doctor.measure_machine import NodeMeeting, measure, meet, share
from trimaran.doctor.preflight import HERE, examine, look_before
from trimaran.doctor.probe_process import ProbeProcess
from trimaran.doctor.read_machine import is_taken, read_disk, read_facts
from trimaran.hardware import Cluster, calibration_folder, detect

if TYPE_CHECKING:
    from rich.table import Table

    from trimaran.app.request.request import Request

COUNTED = ("pass", "warn", "fail", "skip")
MARKS = {"pass": ("pass", "green"), "warn": ("WARN", "yellow"), "fail": ("FAIL", "red"), "skip": ("skip", "dim")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What is to be looked at: with a recipe also whether its run fits here, with a rendezvous other nodes too."""

    recipe: str | None = None
    settings: Sequence[str] = ()
    quick: bool = False
    rendezvous: NodeMeeting | None = None


def examine_machine(asked: Examination, *, as_json: bool) -> int:
    """Print the checklist of this machine; the exit code is 2 where something fails."""
    facts = read_facts(os.environ, quick=asked.quick)
    facts = replace(facts, disk=read_disk(RUNS, measure=not asked.quick), work=_work(asked))
    if asked.quick:
        return _tell(examine(facts), {}, as_json=as_json)
    cluster = detect(
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"), calibrations=calibration_folder(os.environ)
    )
    with ProbeProcess(_probe_environment(asked.rendezvous)) as probe:
        facts = replace(facts, cluster=cluster, measured=measure(probe, cluster))
        others: dict[int, list[CheckResult]] = {}
        if asked.rendezvous:
            facts = replace(facts, fleet=meet(probe, asked.rendezvous, cluster))
        results = examine(facts)
        if asked.rendezvous and facts.fleet and not facts.fleet.missing:
            others = share(probe, results)
    return _tell(results, others, as_json=as_json)


def refuse_unfit_machine(request: "Request", *, where: str = HERE) -> None:
    """Raise when the run could not work on this machine, as far as a moment's look shows."""
    cluster = request.cluster
    look_before(os.environ, request.plan, kind=cluster.device.kind, nodes=cluster.num_nodes, where=where)


def work_of(recipe: Recipe, plan: Plan, cluster: Cluster, *, num_parameters: int = 0) -> Work:
    """Return what a plan asks of the machine; without the number of parameters nothing is said about the disk."""
    prediction, saves = plan.prediction, recipe.checkpoint
    one = checkpoint_bytes(num_parameters, moment_bytes=STATE_BYTES[recipe.train.optimizer.states])
    kept = saves.keep + 1 if saves.every else 1
    every = saves.every if isinstance(saves.every, int) else 0  # "auto" is as often as the disk allows
    prometheus = recipe.telemetry.prometheus
    taken = bool(prometheus.port) and is_taken(prometheus.host, prometheus.port)
    return Work(
        kind=cluster.device.kind,
        ranks=plan.mesh.world_size,
        nodes=cluster.num_nodes,
        device_bytes=(prediction.device_bytes or prediction.peak_bytes) if prediction else Bytes(0),
        error=prediction.error if prediction else 0.0,
        checkpoint_bytes=one,
        disk_bytes=Bytes(kept * one + (4 * num_parameters if recipe.train.save else 0)),
        every=every,
        interval=Seconds(every * prediction.step_seconds) if prediction and every else None,
        ports=(prometheus.port,) if taken else (),
    )


def _work(asked: Examination) -> Work | None:
    if asked.recipe is None and not asked.settings:
        return None
    from trimaran.app.request.request import resolve

    try:
        request = resolve(asked.recipe, asked.settings)
    except UserError as error:
        if not error.code.startswith(("P", "C")):
            raise  # a recipe that cannot be read is no fault of the machine
        return Work(refusal=f"{error.code}: {error.what}", remedy=error.fix)
    parameters = request.outline.num_parameters if request.outline else 0
    return work_of(request.recipe, request.plan, request.cluster, num_parameters=parameters)


def _probe_environment(rendezvous: NodeMeeting | None) -> Mapping[str, str]:
    """Return the environment of the measuring process: gloo's way out is the one that leads to the others."""
    interface = "lo" if rendezvous is None else interface_to(rendezvous.address)
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface, **os.environ} if interface else os.environ


def interface_to(address: str) -> str:
    """Return the name of the interface that leads to `address`; '' where none does. Nothing is sent."""
    host, _, port = address.rpartition(":")
    try:
        family, _, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            own = probe.getsockname()[0]
    except OSError:
        return ""
    return next((name for name, all_ in psutil.net_if_addrs().items() if own in [each.address for each in all_]), "")


def _tell(results: Sequence[CheckResult], others: Mapping[int, Sequence[CheckResult]], *, as_json: bool) -> int:
    everything = [*results, *(each for theirs in others.values() for each in theirs)]
    failed = any(each.status == "fail" for each in everything)
    code = EXIT_USER if failed else EXIT_DONE
    if as_json:
        counts = {status: sum(each.status == status for each in everything) for status in COUNTED}
        told = {"host": socket.gethostname(), "checks": [each.as_dict() for each in results], "counts": counts}
        nodes = {str(node): [each.as_dict() for each in theirs] for node, theirs in others.items()}
        typer.echo(json.dumps(told | ({"nodes": nodes} if nodes else {}) | {"exit": code}))
        return code
    show(results, others)
    return code


def show(results: Sequence[CheckResult], others: Mapping[int, Sequence[CheckResult]]) -> None:
    """Print a line for each check, its fix below it; of other nodes only what is not well."""
    from rich.console import Console

    console = Console(highlight=False)
    trouble = [(f"node {node}: ", each) for node, theirs in others.items() for each in theirs]
    shown = [*(("", each) for each in results), *((who, each) for who, each in trouble if each.fix)]
    for who, result in shown:
        console.print(_lines(who, result))
    counts = Counter(each.status for _, each in [*(("", each) for each in results), *trouble])
    words = {"pass": "passed", "warn": "warnings", "fail": "failed", "skip": "skipped"}
    console.print("\n" + ", ".join(f"{counts[status]} {words[status]}" for status in COUNTED))


def _lines(who: str, result: CheckResult) -> "Table":
    """Return one check as it is shown: mark, code, title and words, which wrap under themselves."""
    from rich.table import Table
    from rich.text import Text

    mark, style = MARKS[result.status]
    table = Table.grid(padding=(0, 1, 0, 0))
    for width in (4, 4, 22):
        table.add_column(min_width=width, max_width=width, no_wrap=True)
    table.add_column()
    words = Text(f"{who}{result.what}", style="dim" if result.status == "skip" else "")
    table.add_row(Text(mark, style=style), Text(result.code, style="dim"), Text(result.title), words)
    if result.fix:
        table.add_row("", "", Text("fix", style="bold", justify="right"), Text(result.fix, style="bold"))
    return table
