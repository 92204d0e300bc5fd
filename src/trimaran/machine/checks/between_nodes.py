"""Checks of what connects nodes: network cards, clocks that agree, and messages between pairs of nodes."""

import math
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from statistics import median

from trimaran.machine.checks.machine_facts import CheckInfo, CheckResult, Facts, Pair, PairSeconds, Problem


def network_cards(facts: Facts) -> CheckResult:
    """List the cards that are down or slow, and the GPUs that reach every card across sockets."""
    info = CheckInfo("H006", "network cards and NUMA")
    interconnect = facts.interconnect
    if interconnect is None:
        return info.skipped("--quick does not read network cards")
    problems: list[Problem] = []
    infiniband = [nic for nic in interconnect.nics if nic.kind == "infiniband"]
    down = [nic.name for nic in infiniband if not nic.is_up]
    if down and len(down) < len(infiniband):
        what = f"{', '.join(down)} down, {len(infiniband) - len(down)} others up"
        problems.append(Problem(what, "check the cable and the subnet manager: `ibstat`"))
    rates = {nic.gigabits for nic in infiniband if nic.is_up and nic.gigabits}
    if len(rates) > 1:
        slow = [nic.name for nic in infiniband if nic.is_up and nic.gigabits == min(rates)]
        problems.append(Problem(f"{', '.join(slow)} at {min(rates):g} Gb/s, others at {max(rates):g}",
                                "a ring is as slow as its slowest card: exclude them with NCCL_IB_HCA"))  # fmt: skip
    is_near = [any(path != "SYS" for path in row) for row in interconnect.gpu_nic_paths]
    far = [str(gpu) for gpu, near in enumerate(is_near) if not near]
    if 0 < len(far) < len(is_near):  # other GPUs have a card on their own socket
        problems.append(Problem(f"GPU {', '.join(far)} reaches every network card across sockets",
                                "expect less bandwidth between nodes; check NCCL_CROSS_NIC and the cards' "
                                "slots"))  # fmt: skip
    missing = {node for node in interconnect.gpu_numa if node >= 0} - interconnect.allowed_numa
    if missing and interconnect.allowed_numa:
        problems.append(Problem(f"this process may use cores of NUMA node {_join(interconnect.allowed_numa)} only, "
                                f"and GPUs are attached to {_join(missing)}",
                                "give the job cores on every socket (Slurm: --cpu-bind=none, or "
                                "--gpu-bind=closest)"))  # fmt: skip
    up = [nic for nic in interconnect.nics if nic.is_up]
    if not up and not problems:
        return info.passed("no network card is up (or Linux does not show it): one node only")
    cards = ", ".join(f"{nic.name} {nic.gigabits:g} Gb/s" if nic.gigabits else nic.name for nic in up)
    return info.worst(problems, cards, nics=[nic.name for nic in up])


def _join(nodes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(nodes)))


EARLIEST_TIMESTAMP = datetime(2025, 1, 1, tzinfo=UTC).timestamp()  # older than this program
# Skew between nodes. At 1 s the order of log lines is lost; at 15 s torchrun's rendezvous drops a node.
WARN_SECONDS, FAIL_SECONDS = 1.0, 10.0


def node_clocks(facts: Facts) -> CheckResult:
    """Report the clock skew between nodes, whose leases and logs compare times; on one node, a wrong date."""
    info = CheckInfo("H012", "clock")
    now = facts.host.clock
    if now and now < EARLIEST_TIMESTAMP:
        return info.fail(f"this machine's clock says {datetime.fromtimestamp(now, UTC):%Y-%m-%d}",
                         "set the clock: chronyc makestep, or timedatectl set-ntp true")  # fmt: skip
    if facts.node_measurements is None or not facts.node_measurements.skews:
        return info.passed("the date is plausible; --nodes compares several nodes")
    names, skews = facts.node_measurements.names, facts.node_measurements.skews
    worst = max(skews, key=lambda node: abs(skews[node]))
    what = f"{names[worst]} is {abs(skews[worst]):.2g} s {'ahead of' if skews[worst] > 0 else 'behind'} {names[0]}"
    fix = f"start chrony or ntpd on {names[worst]}, then check it with `chronyc tracking`"
    evidence = {"skews": dict(skews)}
    if abs(skews[worst]) > FAIL_SECONDS:
        return info.fail(what, fix, **evidence)
    if abs(skews[worst]) > WARN_SECONDS:
        return info.warn(what, fix, **evidence)
    return info.passed(f"{len(names)} nodes agree within {abs(skews[worst]) * 1000:.1f} ms", **evidence)


SLOW_PAIR_FACTOR = 1.5  # times the median of the faster pairs: then one of the two nodes is suspect
DOMINANT_CULPRIT_FACTOR = 3.0  # a node this many times slower than another bad node takes all the blame
MAX_NAMED_NODES = 4


def first_round(nodes: int) -> list[Pair]:
    """Return pairs of neighbours; with an odd count, the last node waits for the second round."""
    return [(node, node + 1) for node in range(0, nodes - 1, 2)]


def second_round(nodes: int, first: PairSeconds) -> list[Pair]:
    """Return each suspect, and each node that was not measured yet, paired with a healthy node.

    With few healthy nodes, one of them is paired several times, in the order of the list. If there are none, or no
    suspects, the first half is paired with the second half, so that all partners are new.
    """
    if nodes == 3:
        return [(0, 2), (1, 2)]
    bad = {node for pair in suspects(first) for node in pair}
    measured = {node for pair in first for node in pair}
    good = [node for node in range(nodes) if node in measured and node not in bad]
    undecided = [node for node in range(nodes) if node not in good]
    if not undecided or not good:
        half = nodes // 2
        return [(node, node + half) for node in range(half)]
    return [(node, good[index % len(good)]) for index, node in enumerate(undecided)]


def suspects(*rounds: PairSeconds) -> set[Pair]:
    """Return the pairs that failed, or took much longer than the median of the faster half."""
    times = sorted(seconds for each in rounds for seconds in each.values() if seconds is not None)
    usual = median(times[: max(1, (len(times) + 1) // 2)]) if times else 0.0
    can_compare = len(times) > 1
    return {
        pair
        for each in rounds
        for pair, seconds in each.items()
        if seconds is None or (can_compare and seconds > SLOW_PAIR_FACTOR * usual)
    }


def culprits(first: PairSeconds, second: PairSeconds) -> set[int]:
    """Return the nodes that were slow in every pair: with two partners, or with one that is healthy elsewhere.

    If one of them is far worse than the others, only that one counts: on a busy machine its partner, if it was
    interrupted once, would look bad twice. A second bad node shows up once the first is gone.
    """
    bad = suspects(first, second)
    healthy = {node for pair in (*first, *second) if pair not in bad for node in pair}
    bad_pairs = Counter(node for pair in bad for node in pair)
    beside_healthy = {node for pair in bad for node in pair if set(pair) - {node} <= healthy}
    found = {node for node, count in bad_pairs.items() if node not in healthy and (count > 1 or node in beside_healthy)}
    took = [
        (pair, math.inf if seconds is None else seconds) for each in (first, second) for pair, seconds in each.items()
    ]
    best = {node: min(seconds for pair, seconds in took if node in pair) for node in found}
    return {node for node in found if DOMINANT_CULPRIT_FACTOR * best[node] >= max(best.values())}


def node_pairs(facts: Facts) -> CheckResult:
    """Name the nodes that are slow or silent."""
    info = CheckInfo("H018", "node pairs")
    nodes = facts.node_measurements
    if nodes is None:
        return info.skipped("one node; for several: --nodes N --node I --address HOST:PORT on each of them")
    if nodes.missing:
        return info.fail(nodes.missing, "start the same command on every node, and check that they reach the address")
    if len(nodes.rounds) < 2:
        return info.skipped("the pairs were not measured")
    first, second = nodes.rounds[:2]
    bad, slow_pairs = sorted(culprits(first, second)), suspects(first, second)
    both = [*first.items(), *second.items()]
    times = [took for _, took in both if took is not None]
    evidence = {"rounds": [{"-".join(map(str, pair)): took for pair, took in each.items()} for each in (first, second)]}
    if not times:
        return info.fail("no two nodes could exchange a message", "check the network, the firewall and the address",
                         **evidence)  # fmt: skip
    if bad:
        worst = [took for pair, took in both if pair in slow_pairs and set(pair) & set(bad)]
        how = "does not answer" if None in worst else f"is {max(filter(None, worst)) / min(times):.1f} times slower"
        return info.fail(f"{_names(nodes.names, bad)} {how} with every partner; the other nodes are healthy",
                         f"leave {_names(nodes.names, bad)} out, and check its network card, cable and load",
                         culprits=[nodes.names[node] for node in bad], **evidence)  # fmt: skip
    if slow_pairs:
        return info.warn(f"{_names(nodes.names, min(slow_pairs))} were slow together, but fast with other nodes",
                         "check the link between them; if it was a passing load, a second run passes",
                         **evidence)  # fmt: skip
    ratio = max(times) / min(times)
    return info.passed(f"{len(nodes.names)} nodes, the slowest pair takes {ratio:.2f} times the fastest", **evidence)


def _names(names: tuple[str, ...], nodes: Iterable[int]) -> str:
    listed = [names[node] for node in nodes]
    more = f" and {len(listed) - MAX_NAMED_NODES} more" if len(listed) > MAX_NAMED_NODES else ""
    return " and ".join(listed[:MAX_NAMED_NODES]) + more
