"""Topology: NVLink where the GPUs have it, equal for all, and whether GPUs may read each other's memory."""

from collections import Counter

from trimaran.doctor.checks.result import CheckInfo, CheckResult, Trouble
from trimaran.doctor.machine_facts import Facts
from trimaran.hardware import Cluster
from trimaran.hardware.gpu_topology import Matrix

LOOK = CheckInfo("H005", "NVLink and peers")
# What `nvidia-smi topo -p2p` answers for a pair that cannot.
REFUSALS = {
    "CNS": "the chipset does not",
    "GNS": "the GPUs do not",
    "TNS": "the topology does not",
    "NS": "not supported",
    "DR": "switched off in the registry",
    "U": "unknown",
}
SHOWN = 4  # pairs by name; the rest are counted


def check(facts: Facts) -> CheckResult:
    """Say which pairs of GPUs lack a link that the others have."""
    if len(facts.gpus) < 2:
        return LOOK.skipped("fewer than two GPUs here")
    wiring = facts.wiring
    if wiring is None or not (wiring.topology or wiring.peers):
        return LOOK.skipped("the quick look leaves links out" if wiring is None else "the driver shows no topology")
    troubles = [*_links(wiring.topology, facts.cluster), *_peers(wiring.peers)]
    ways = Counter(way for row in wiring.topology for way in row if way != "X")
    healthy = f"{len(wiring.topology)} GPUs, {', '.join(f'{way} x {count // 2}' for way, count in ways.most_common())}"
    return LOOK.worst(troubles, healthy, ways=dict(ways))


def _links(matrix: Matrix, cluster: Cluster | None) -> list[Trouble]:
    """Return what is uneven. Cards that meet in pairs over bridges are as they should be; a board with NVLink to all
    has it everywhere, and as many lanes on each GPU."""
    pairs = _pairs(matrix)
    lanes = [sum(int(way[2:]) for way in row if way.startswith("NV")) for row in matrix]
    is_board = cluster is not None and cluster.device.link_bandwidth > cluster.device.pcie_bandwidth
    found: list[Trouble] = []
    without = [pair for pair, way in pairs.items() if not way.startswith("NV")]
    if without and (is_board or len(without) < len(pairs) / 2):
        found.append(Trouble(f"no NVLink between {_named(without)}",
                             "`nvidia-smi nvlink -s` shows dead links; is the fabric manager running?"))  # fmt: skip
    if lanes and max(lanes) and min(lanes) < max(lanes) and not without:
        weak = [str(gpu) for gpu, count in enumerate(lanes) if count < max(lanes)]
        found.append(Trouble(f"GPU {', '.join(weak)} has {min(lanes)} NVLinks, the others {max(lanes)}",
                             "a link is down: reset the GPU, then have the board looked at"))  # fmt: skip
    return found


def _peers(matrix: Matrix) -> list[Trouble]:
    refused = {pair: word for pair, word in _pairs(matrix).items() if word in REFUSALS}
    if not refused:
        return []
    why = ", ".join(f"{word}: {REFUSALS[word]}" for word in sorted(set(refused.values())))
    return [Trouble(f"no peer access between {_named(list(refused))} ({why}): NCCL goes through host memory there",
                    "normal for GeForce; on servers switch ACS and the IOMMU off in the BIOS")]  # fmt: skip


def _pairs(matrix: Matrix) -> dict[tuple[int, int], str]:
    return {(a, b): matrix[a][b] for a in range(len(matrix)) for b in range(a + 1, len(matrix))}


def _named(pairs: list[tuple[int, int]]) -> str:
    shown = ", ".join(f"GPU {a} and {b}" for a, b in pairs[:SHOWN])
    return shown if len(pairs) <= SHOWN else f"{shown} and {len(pairs) - SHOWN} more pairs"
