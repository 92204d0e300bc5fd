"""What only a process with torch can tell: products, sums, and the ways to other nodes. The order of the questions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimaran.core import Seconds, UserError
from trimaran.doctor.checks.pairs import first_round, second_round
from trimaran.doctor.checks.result import CheckResult
from trimaran.doctor.machine_facts import MachineMeasurements, NodeMeasurements, Pair
from trimaran.doctor.probe_process import START_SECONDS, ProbeError, ProbeProcess
from trimaran.hardware import Cluster, num_cores

SECONDS = {"cpu": Seconds(0.4), "cuda": Seconds(1.0)}  # of each measurement
MOST_CPU_RANKS = 4  # that sum on a CPU: they only show that they can
PATIENCE = 90.0  # for one answer
PAIR_PATIENCE = 25.0  # for each pair of a round, one after the other at worst


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMeeting:
    """Where `nodes` nodes meet, and which of them we are."""

    nodes: int
    node: int
    address: str
    seconds: float = 120.0

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        right = 0 <= self.node < self.nodes and self.nodes > 1 and host and port.isdigit() and 0 < int(port) < 1 << 16
        if not right:
            raise UserError("H020", f"--nodes {self.nodes} --node {self.node} --address '{self.address}' do not fit "
                            "together", where="trimaran doctor", fix="on node I of N: --nodes N --node I (from 0) "
                            "--address HOST:PORT, where HOST is node 0 and PORT is free there")  # fmt: skip


def measure(probe: ProbeProcess, cluster: Cluster) -> MachineMeasurements:
    """Return what this machine's devices do. What goes wrong is part of the answer, or the reason for none."""
    kind, devices = cluster.device.kind, cluster.devices_per_node
    seconds, ranks = SECONDS[kind], max(2, min(devices, MOST_CPU_RANKS)) if kind == "cpu" else devices
    try:
        seen = probe.ask("look", within=START_SECONDS, kind=kind)
        reduce: Mapping[str, Any] = {}
        if ranks > 1:
            reduce = _sums(probe, kind, ranks, seconds)
        done = probe.ask("products", within=PATIENCE, kind=kind, devices=devices, cores=num_cores(), seconds=seconds)
    except ProbeError as error:
        return MachineMeasurements(missing=f"nothing could be measured: {error}")
    return MachineMeasurements(
        products=done["rates"],
        failures=done["failures"],
        precision=done["precision"],
        reduce=reduce,
        archs=tuple(seen["archs"]),
        capabilities=tuple(done["capabilities"]),
    )


def meet(probe: ProbeProcess, rendezvous: NodeMeeting, cluster: Cluster) -> NodeMeasurements:
    """Return what this allocation's nodes are to each other, as node 0 found it; elsewhere without the clocks."""
    kind, devices = cluster.device.kind, cluster.devices_per_node
    place = {"nodes": rendezvous.nodes, "node": rendezvous.node, "address": rendezvous.address}
    try:
        met = probe.ask("meet", within=rendezvous.seconds * 4, seconds=rendezvous.seconds, **place)
        first = _round(probe, first_round(rendezvous.nodes), kind, devices)
        second = _round(probe, second_round(rendezvous.nodes, first), kind, devices)
    except ProbeError as error:
        return NodeMeasurements(names=(), missing=f"the nodes could not be compared: {error}")
    skews = {int(node): float(skew) for node, skew in met["skews"].items()}
    return NodeMeasurements(names=tuple(met["names"]), rounds=(first, second), skews=skews)


def share(probe: ProbeProcess, results: Sequence[CheckResult]) -> dict[int, list[CheckResult]]:
    """Return what the other nodes found on themselves, by node; on node 0 only."""
    told = probe.ask("share", within=PATIENCE, value=[each.as_dict() for each in results])["others"]
    return {int(node): [CheckResult(**each) for each in theirs] for node, theirs in told.items()}


def _sums(probe: ProbeProcess, kind: str, ranks: int, seconds: float) -> Mapping[str, Any]:
    try:
        return probe.ask("sums", within=PATIENCE, kind=kind, ranks=ranks, seconds=seconds)
    except ProbeError as error:
        return {"error": str(error), "ranks": ranks, "backend": "nccl" if kind == "cuda" else "gloo"}


def _round(probe: ProbeProcess, pairs: Sequence[Pair], kind: str, devices: int) -> dict[Pair, float | None]:
    within = PAIR_PATIENCE * (2 + len(pairs))
    told = probe.ask("pairs", within=within, pairs=[list(pair) for pair in pairs], kind=kind, devices=devices)
    return {pair: told["seconds"].get(f"{pair[0]}-{pair[1]}") for pair in pairs}
