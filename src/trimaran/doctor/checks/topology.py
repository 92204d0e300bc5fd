"""H005: NVLink between all GPUs that have it, with equal widths, and peer access between GPUs."""

from collections import Counter

from trimaran.doctor.checks.result import CheckInfo, CheckResult, Problem
from trimaran.doctor.machine_facts import Facts
from trimaran.hardware import Cluster
from trimaran.hardware.gpu_topology import Matrix

INFO = CheckInfo("H005", "NVLink and P2P")
# What `nvidia-smi topo -p2p` prints for a pair without peer access.
P2P_REFUSALS = {
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "NS": "not supported",
    "DR": "disabled by a registry key",
    "U": "unknown",
}
MAX_NAMED_PAIRS = 4  # the rest are counted


def check(facts: Facts) -> CheckResult:
    """List the pairs of GPUs without a link that the others have."""
    if len(facts.gpus) < 2:
        return INFO.skipped("fewer than two GPUs here")
    interconnect = facts.interconnect
    if interconnect is None or not (interconnect.topology or interconnect.peers):
        return INFO.skipped("--quick does not read links" if interconnect is None else "the driver reports no topology")
    problems = [*_links(interconnect.topology, facts.cluster), *_peers(interconnect.peers)]
    kinds = Counter(kind for row in interconnect.topology for kind in row if kind != "X")
    links = ", ".join(f"{kind} x {count // 2}" for kind, count in kinds.most_common())
    return INFO.worst(problems, f"{len(interconnect.topology)} GPUs, {links}", ways=dict(kinds))


def _links(matrix: Matrix, cluster: Cluster | None) -> list[Problem]:
    """Return uneven links.

    GPUs bridged in pairs are fine. A board with all-to-all NVLink must have it everywhere, with equal lane counts.
    """
    pairs = _pairs(matrix)
    lanes = [sum(int(kind[2:]) for kind in row if kind.startswith("NV")) for row in matrix]
    is_board = cluster is not None and cluster.device.link_bandwidth > cluster.device.pcie_bandwidth
    found: list[Problem] = []
    without = [pair for pair, kind in pairs.items() if not kind.startswith("NV")]
    if without and (is_board or len(without) < len(pairs) / 2):
        found.append(Problem(f"no NVLink between {_named(without)}",
                             "`nvidia-smi nvlink -s` shows dead links; is the fabric manager running?"))  # fmt: skip
    if lanes and max(lanes) and min(lanes) < max(lanes) and not without:
        weak = [str(gpu) for gpu, count in enumerate(lanes) if count < max(lanes)]
        found.append(Problem(f"GPU {', '.join(weak)} has {min(lanes)} NVLinks, the others {max(lanes)}",
                             "a link is down: reset the GPU, then have the board inspected"))  # fmt: skip
    return found


def _peers(matrix: Matrix) -> list[Problem]:
    refused = {pair: answer for pair, answer in _pairs(matrix).items() if answer in P2P_REFUSALS}
    if not refused:
        return []
    why = ", ".join(f"{answer}: {P2P_REFUSALS[answer]}" for answer in sorted(set(refused.values())))
    return [Problem(f"no peer access between {_named(list(refused))} ({why}): NCCL copies through host memory there",
                    "normal for GeForce; on servers disable ACS and the IOMMU in the BIOS")]  # fmt: skip


def _pairs(matrix: Matrix) -> dict[tuple[int, int], str]:
    return {(a, b): matrix[a][b] for a in range(len(matrix)) for b in range(a + 1, len(matrix))}


def _named(pairs: list[tuple[int, int]]) -> str:
    shown = ", ".join(f"GPU {a} and {b}" for a, b in pairs[:MAX_NAMED_PAIRS])
    return shown if len(pairs) <= MAX_NAMED_PAIRS else f"{shown} and {len(pairs) - MAX_NAMED_PAIRS} more pairs"
