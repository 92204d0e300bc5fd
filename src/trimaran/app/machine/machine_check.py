"""`trimaran doctor` without a run: checks this machine, or several nodes together, before a run."""

import json
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil
import typer

from trimaran.app.recipe.options import RUNS
from trimaran.core import EXIT_DONE, EXIT_USER, Bytes, Seconds, UserError
from trimaran.cost import STATE_BYTES, checkpoint_bytes
from trimaran.machine import calibration_folder, detect, is_port_in_use, read_disk, read_facts
from trimaran.machine.checks.machine_facts import CheckResult, RunRequirements
from trimaran.machine.checks.measure_machine import (
    ProbeProcess,
    RendezvousOptions,
    gather_results,
    measure_devices,
    measure_nodes,
)
from trimaran.machine.checks.preflight import THIS_MACHINE, check_before_run, run_checks

if TYPE_CHECKING:
    from trimaran.app.recipe.request import Request

STATUSES = ("pass", "warn", "fail", "skip")
MARKS = {"pass": ("pass", "green"), "warn": ("WARN", "yellow"), "fail": ("FAIL", "red"), "skip": ("skip", "dim")}


def check_machine(
    recipe: str | None, settings: Sequence[str], rendezvous: RendezvousOptions | None, *, quick: bool, as_json: bool
) -> int:
    """Check this machine, also for a recipe, and the other nodes of a rendezvous; return 2 if a check fails."""
    facts = read_facts(os.environ, quick=quick)
    facts = replace(facts, disk=read_disk(RUNS, measure=not quick), requirements=_requirements(recipe, settings))
    if quick:
        return _print_results(run_checks(facts), {}, as_json=as_json)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    cluster = detect(visible_devices=visible, calibrations=calibration_folder(os.environ))
    # gloo and NCCL use the interface to the other nodes.
    interface = "lo" if rendezvous is None else interface_to(rendezvous.address)
    own = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
    with ProbeProcess({**own, **os.environ}) as probe:
        facts = replace(facts, cluster=cluster, measured=measure_devices(probe, cluster))
        others: dict[int, list[CheckResult]] = {}
        if rendezvous:
            facts = replace(facts, node_measurements=measure_nodes(probe, rendezvous, cluster))
        results = run_checks(facts)
        if rendezvous and facts.node_measurements and not facts.node_measurements.missing:
            others = gather_results(probe, results)
    return _print_results(results, others, as_json=as_json)


def refuse_unfit_machine(request: "Request", *, where: str = THIS_MACHINE) -> None:
    """Raise if a quick check shows that the run cannot work on this machine."""
    cluster = request.cluster
    check_before_run(os.environ, request.plan, kind=cluster.device.kind, nodes=cluster.num_nodes, where=where)


def _requirements(recipe: str | None, settings: Sequence[str]) -> RunRequirements | None:
    """Return what the run requires of the machine; None if neither a recipe nor a setting is named."""
    if recipe is None and not settings:
        return None
    from trimaran.app.recipe.request import resolve

    try:
        request = resolve(recipe, settings)
    except UserError as error:
        if not error.code.startswith(("P", "C")):
            raise  # a recipe that cannot be read is not the machine's fault
        return RunRequirements(refusal=f"{error.code}: {error.what}", remedy=error.fix)
    parameters = request.outline.saved_parameters if request.outline else 0

    resolved, prediction = request.recipe, request.plan.prediction
    saves = resolved.checkpoint
    one = checkpoint_bytes(parameters, moment_bytes=STATE_BYTES[resolved.train.optimizer.states])
    kept = 0 if saves.is_off else saves.keep + 1 if saves.every else 1
    every = saves.every if isinstance(saves.every, int) else 0  # "auto" adapts to the disk
    prometheus = resolved.telemetry.prometheus
    taken = bool(prometheus.port) and is_port_in_use(prometheus.host, prometheus.port)
    return RunRequirements(
        kind=request.cluster.device.kind,
        ranks=request.plan.mesh.world_size,
        nodes=request.cluster.num_nodes,
        device_bytes=(prediction.device_bytes or prediction.peak_bytes) if prediction else Bytes(0),
        error=prediction.error if prediction else 0.0,
        checkpoint_bytes=Bytes(0) if saves.is_off else one,
        disk_bytes=Bytes(kept * one + (4 * parameters if resolved.train.save else 0)),
        every=every,
        interval=Seconds(every * prediction.step_seconds) if prediction and every else None,
        ports=(prometheus.port,) if taken else (),
    )


def interface_to(address: str) -> str:
    """Return the name of the interface that leads to `address`; '' if there is none. Nothing is sent."""
    host, _, port = address.rpartition(":")
    try:
        family, _, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            own = probe.getsockname()[0]
    except OSError:
        return ""
    return next((name for name, all_ in psutil.net_if_addrs().items() if own in [each.address for each in all_]), "")


def _print_results(
    results: Sequence[CheckResult], others: Mapping[int, Sequence[CheckResult]], *, as_json: bool
) -> int:
    everything = [*results, *(each for theirs in others.values() for each in theirs)]
    failed = any(each.status == "fail" for each in everything)
    code = EXIT_USER if failed else EXIT_DONE
    if as_json:
        counts = {status: sum(each.status == status for each in everything) for status in STATUSES}
        answer = {"host": socket.gethostname(), "checks": [each.as_dict() for each in results], "counts": counts}
        nodes = {str(node): [each.as_dict() for each in theirs] for node, theirs in others.items()}
        typer.echo(json.dumps(answer | ({"nodes": nodes} if nodes else {}) | {"exit": code}))
        return code
    # A line for each check with its fix below it; of other nodes only checks with a fix.
    from rich.table import Table
    from rich.text import Text

    from trimaran.app.show.clean_console import open_console

    console = open_console()
    remote = [(f"node {node}: ", each) for node, theirs in others.items() for each in theirs]
    shown = [*(("", each) for each in results), *((node, each) for node, each in remote if each.fix)]
    for node, result in shown:
        mark, style = MARKS[result.status]
        table = Table.grid(padding=(0, 1, 0, 0))
        for width in (4, 4, 22):
            table.add_column(min_width=width, max_width=width, no_wrap=True)
        table.add_column()
        text = Text(f"{node}{result.what}", style="dim" if result.status == "skip" else "")
        table.add_row(Text(mark, style=style), Text(result.code, style="dim"), Text(result.title), text)
        if result.fix:
            table.add_row("", "", Text("fix", style="bold", justify="right"), Text(result.fix, style="bold"))
        console.print(table)
    counts = Counter(each.status for _, each in [*(("", each) for each in results), *remote])
    labels = {"pass": "passed", "warn": "warnings", "fail": "failed", "skip": "skipped"}
    console.print("\n" + ", ".join(f"{counts[status]} {labels[status]}" for status in STATUSES))
    return code
