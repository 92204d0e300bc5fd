"""What measured collectives say about links: against the planner's rates, for its calibration, and who is slow."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimaran.cost.collective import NETWORK_HOP_FACTOR, REDUCE_HOP_FACTOR, Ring, ring_of
from trimaran.machine import Calibration, Cluster
from trimaran.machine.calibration import Collectives
from trimaran.machine.checks.between_nodes import culprits, suspects
from trimaran.machine.comm_result import CommCurve, CommPair, CommResult, LinkFit

RATES = {"all_reduce": "all_reduce", "all_gather": "all_gather", "all_to_all": "all_to_all", "send_recv": "send"}
MAX_BANDWIDTH_ERROR = 0.3  # of a fitted bandwidth that a calibration takes


@dataclass(frozen=True, slots=True, kw_only=True)
class CommOutlier:
    """Ranks, or one pair of them, that are slower than the others, and how many times."""

    ranks: tuple[int, ...]
    factor: float
    is_pair: bool

    def text(self, hosts: Sequence[str]) -> str:
        names = [f"{rank} ({hosts[rank]})" if rank < len(hosts) else f"{rank}" for rank in self.ranks]
        if self.is_pair:
            return f"ranks {' and '.join(names)} are {self.factor:.1f} times slower together than other pairs"
        many = len(names) > 1
        return (f"rank{'s' if many else ''} {', '.join(names)} {'are' if many else 'is'} {self.factor:.1f} times "
                "slower with every partner than the other ranks")  # fmt: skip


def planned_link(cluster: Cluster, ranks: Sequence[int], collective: str) -> dict[str, Any]:
    """Return the link of the group and the bus bandwidth that the planner expects, in 10^9 bytes a second.

    The planner has no rate for a broadcast.
    """
    stride = ranks[1] - ranks[0]
    ring = ring_of(cluster.levels, len(ranks), stride)
    link = next(each for each in cluster.levels if each.name == ring.link)
    planned = _planned_bandwidth(ring, collective)
    return {"link": link.name, "link_gb_per_second": link.bandwidth / 1e9,
            "planned_gb_per_second": planned / 1e9 if planned else None}  # fmt: skip


def _planned_bandwidth(ring: Ring, collective: str) -> float | None:
    return {
        "all_reduce": ring.reduce_bandwidth,
        "all_gather": ring.gather_bandwidth,
        "reduce_scatter": ring.gather_bandwidth,
        "all_to_all": ring.exchange_bandwidth,
        "send_recv": ring.send_bandwidth,
    }.get(collective)


def find_outliers(pairs: Sequence[CommPair]) -> list[CommOutlier]:
    """Return the slow ranks, or else the slow pairs. Pairs inside a node and across nodes are compared apart."""
    found: list[CommOutlier] = []
    for nodes in (1, 2):
        seconds = {each.ranks: each.seconds for each in pairs if each.nodes == nodes}
        slow = suspects(seconds)
        if not slow:
            continue
        usual = statistics.median([took for pair, took in seconds.items() if pair not in slow])
        bad = culprits(seconds, {})
        for rank in sorted(bad):
            took = statistics.median(took for pair, took in seconds.items() if rank in pair)
            found.append(CommOutlier(ranks=(rank,), factor=took / usual, is_pair=False))
        found += [CommOutlier(ranks=pair, factor=seconds[pair] / usual, is_pair=True)
                  for pair in sorted(slow) if not bad & set(pair)]  # fmt: skip
    return found


def calibrated(result: CommResult, earlier: Calibration | None) -> Calibration:
    """Return `earlier` with the measured links, without factors that runs fitted to these links before."""
    inside = _widest(result, between_nodes=False)
    network = _widest(result, between_nodes=True)
    update: dict[str, Any] = {"date": result.date, "device": result.device}
    names = set()
    for field, curves in (("collectives", inside), ("network", network)):
        measured = _collectives(curves, per_node=result.world_size // result.num_nodes) if curves else None
        if measured is not None:
            update[field] = measured
            names.add(curves[0].link)
    base = earlier or Calibration()
    if base.fitted is not None:
        links = {name: factors for name, factors in base.fitted.links.items() if name not in names}
        update["fitted"] = base.fitted.model_copy(update={"links": links})
    return Calibration.model_validate(base.model_copy(update=update).model_dump())


def _widest(result: CommResult, *, between_nodes: bool) -> list[CommCurve]:
    """Return the curves of the group with most ranks, inside a node or between nodes."""
    curves = [each for each in result.curves if (each.nodes > 1) == between_nodes]
    most = max((each.ranks for each in curves), default=0)
    group = next((each.group for each in curves if each.ranks == most), "")
    return [each for each in curves if each.group == group]


def _collectives(curves: Sequence[CommCurve], *, per_node: int) -> Collectives | None:
    """Return latency and bus bandwidths in the terms of the cost model; None if no bandwidth could be fitted."""
    fits = {each.collective: (each, fit) for each in curves if (fit := each.fit()) is not None}
    ranks, nodes = curves[0].ranks, curves[0].nodes
    rates: dict[str, float] = {}
    for name, field in RATES.items():
        if name in fits and fits[name][1].bandwidth_error <= MAX_BANDWIDTH_ERROR:
            rates[f"{field}_gb_per_second"] = fits[name][1].bytes_per_second / 1e9
    if nodes > 1 and "all_to_all_gb_per_second" in rates:
        # The cost model counts only what leaves the node; what stays inside it takes no time on this link.
        rates["all_to_all_gb_per_second"] *= (ranks - min(per_node, ranks - 1)) / (ranks - 1)
    hop = _hop_seconds(fits, ranks)
    if not rates or hop <= 0:
        return None
    latency = hop / (NETWORK_HOP_FACTOR if nodes > 1 else 1.0)
    return Collectives(devices=ranks, latency_us=latency * 1e6, **rates)


def _hop_seconds(fits: Mapping[str, tuple[CommCurve, LinkFit]], ranks: int) -> float:
    """Return the latency of a hop of an all-gather; without one, from the next best collective."""
    hops = {"all_gather": ranks - 1, "reduce_scatter": ranks - 1, "send_recv": 1,
            "all_reduce": 2 * (ranks - 1) * REDUCE_HOP_FACTOR, "all_to_all": ranks - 1, "broadcast": 1}  # fmt: skip
    for name, count in hops.items():
        if name in fits:
            curve, fit = fits[name]
            smallest = min(curve.points, key=lambda point: point.num_bytes).seconds
            return (fit.alpha_seconds or smallest) / count
    return 0.0
