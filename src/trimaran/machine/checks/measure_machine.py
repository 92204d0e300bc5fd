"""Measures devices and node pairs through the probe process, because only that one imports torch.

The probe, `python -m trimaran.machine.probe`, imports torch; it is a process that exchanges JSON lines with us.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimaran.core import ChildProcess, Seconds, UserError
from trimaran.machine.checks.between_nodes import first_round, second_round
from trimaran.machine.checks.machine_facts import CheckResult, MachineMeasurements, NodeMeasurements, Pair
from trimaran.machine.cluster import Cluster
from trimaran.machine.detect import num_cores

START_SECONDS = Seconds(120.0)  # timeout to import torch from a cold network disk


class ProbeError(Exception):
    """The probe process died, timed out, or answered with an error."""


class ProbeProcess(ChildProcess):
    """A probe process with its own `environment`. If it dies, the error is the last line of its standard error."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__([sys.executable, "-m", "trimaran.machine.probe"], environment=environment)

    def request(self, do: str, *, within: float, **order: Any) -> dict[str, Any]:
        """Return the answer to a request. Raises `ProbeError` after `within` seconds, or if the answer is an error."""
        try:
            self.send({"do": do, **order})
            answer = self.receive(seconds=within)
        except TimeoutError:
            raise ProbeError("the probe did not answer in time") from None
        except (BrokenPipeError, EOFError):
            raise ProbeError(self.last_stderr_line() or f"the probe exited with code {self.wait()}") from None
        if error := answer.get("error"):
            raise ProbeError(error)
        return answer


MEASURE_SECONDS = {"cpu": Seconds(0.4), "cuda": Seconds(1.0)}  # per measurement
MAX_CPU_RANKS = 4  # in an all-reduce on a CPU, which only has to show that it works
ANSWER_SECONDS = 90.0  # timeout of one request
PAIR_SECONDS = 25.0  # timeout per pair of a round: at worst they run one after the other


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousOptions:
    """Where `nodes` nodes meet, and which of them this is."""

    nodes: int
    node: int
    address: str
    seconds: float = 120.0

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        valid = 0 <= self.node < self.nodes and self.nodes > 1 and host and port.isdigit() and 0 < int(port) < 1 << 16
        if not valid:
            raise UserError(
                "H020.nodes-node-address",
                where="trimaran doctor",
                nodes=self.nodes,
                node=self.node,
                address=self.address,
            )


def measure_devices(probe: ProbeProcess, cluster: Cluster) -> MachineMeasurements:
    """Return measurements of this machine's devices. Errors are part of the result, or the reason for an empty one."""
    kind, devices = cluster.device.kind, cluster.devices_per_node
    seconds, ranks = MEASURE_SECONDS[kind], devices
    if cluster.device.traits.shares_cores:
        ranks = max(2, min(devices, MAX_CPU_RANKS))
    try:
        seen = probe.request("versions", within=START_SECONDS, kind=kind)
        all_reduce: Mapping[str, Any] = {}
        if ranks > 1:
            try:
                order = {"kind": kind, "ranks": ranks, "seconds": seconds}
                all_reduce = probe.request("all_reduce", within=ANSWER_SECONDS, **order)
            except ProbeError as error:
                all_reduce = {"error": str(error), "ranks": ranks, "backend": cluster.device.traits.backend}
        options = {"kind": kind, "devices": devices, "cores": num_cores(), "seconds": seconds}
        matmuls = probe.request("matmuls", within=ANSWER_SECONDS, **options)
    except ProbeError as error:
        return MachineMeasurements(missing=f"nothing could be measured: {error}")
    return MachineMeasurements(
        matmul_flops=matmuls["rates"],
        failures=matmuls["failures"],
        precision=matmuls["precision"],
        all_reduce=all_reduce,
        archs=tuple(seen["archs"]),
        capabilities=tuple(matmuls["capabilities"]),
    )


def measure_nodes(probe: ProbeProcess, rendezvous: RendezvousOptions, cluster: Cluster) -> NodeMeasurements:
    """Return pair times and clock skews of this allocation's nodes; only node 0 gets the skews."""
    kind, devices = cluster.device.kind, cluster.devices_per_node
    where = {"nodes": rendezvous.nodes, "node": rendezvous.node, "address": rendezvous.address}
    try:
        met = probe.request("rendezvous", within=rendezvous.seconds * 4, seconds=rendezvous.seconds, **where)
        first = _round(probe, first_round(rendezvous.nodes), kind, devices)
        second = _round(probe, second_round(rendezvous.nodes, first), kind, devices)
    except ProbeError as error:
        return NodeMeasurements(names=(), missing=f"the nodes could not be compared: {error}")
    skews = {int(node): float(skew) for node, skew in met["skews"].items()}
    return NodeMeasurements(names=tuple(met["names"]), rounds=(first, second), skews=skews)


def gather_results(probe: ProbeProcess, results: Sequence[CheckResult]) -> dict[int, list[CheckResult]]:
    """Send this node's results to node 0. Return those of the other nodes on node 0, nothing elsewhere."""
    others = probe.request("gather", within=ANSWER_SECONDS, value=[each.as_dict() for each in results])["others"]
    return {int(node): [CheckResult(**each) for each in theirs] for node, theirs in others.items()}


def _round(probe: ProbeProcess, pairs: Sequence[Pair], kind: str, devices: int) -> dict[Pair, float | None]:
    within = PAIR_SECONDS * (2 + len(pairs))
    answer = probe.request("pairs", within=within, pairs=[list(pair) for pair in pairs], kind=kind, devices=devices)
    return {pair: answer["seconds"].get(f"{pair[0]}-{pair[1]}") for pair in pairs}
