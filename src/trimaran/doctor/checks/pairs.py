"""Nodes in pairs, in two rounds: who is slow or silent with whomever it meets is the one."""

import math
from collections import Counter
from collections.abc import Iterable
from statistics import median

from trimaran.doctor.checks.result import CheckInfo, CheckResult
from trimaran.doctor.machine_facts import Facts, Pair, Round

LOOK = CheckInfo("H018", "nodes in pairs")
SLOW = 1.5  # times the usual pair's seconds: then one of the two is suspect
ALIKE = 3.0  # times slower than another bad node: then it alone is to blame
SHOWN = 4  # nodes by name


def first_round(nodes: int) -> list[Pair]:
    """Return neighbours in pairs; an odd one waits for the second round."""
    return [(node, node + 1) for node in range(0, nodes - 1, 2)]


def second_round(nodes: int, first: Round) -> list[Pair]:
    """Return each suspect, and who has not been seen yet, with a node that is known to be well.

    Where few are well, one of them meets several, in the order of the list. Where none is, or nobody is suspect, the
    first half meets the second, so that all partners are new ones.
    """
    if nodes == 3:
        return [(0, 2), (1, 2)]
    bad = {node for pair in suspects(first) for node in pair}
    seen = {node for pair in first for node in pair}
    good = [node for node in range(nodes) if node in seen and node not in bad]
    open_ = [node for node in range(nodes) if node not in good]
    if not open_ or not good:
        half = nodes // 2
        return [(node, node + half) for node in range(half)]
    return [(node, good[place % len(good)]) for place, node in enumerate(open_)]


def suspects(*rounds: Round) -> set[Pair]:
    """Return the pairs that failed, or took much longer than the quicker half usually does."""
    told = sorted(took for each in rounds for took in each.values() if took is not None)
    usual = median(told[: max(1, (len(told) + 1) // 2)]) if told else 0.0
    slow = len(told) > 1
    return {pair for each in rounds for pair, took in each.items() if took is None or (slow and took > SLOW * usual)}


def culprits(first: Round, second: Round) -> set[int]:
    """Return the nodes that were well with nobody: either with two partners, or with one that is well elsewhere.

    Beside one that is far worse than the others only that one counts: on a busy machine a partner of it that was
    also interrupted would look bad twice. Who is left shows when it is gone.
    """
    bad = suspects(first, second)
    well = {node for pair in (*first, *second) if pair not in bad for node in pair}
    met = Counter(node for pair in bad for node in pair)
    beside_well = {node for pair in bad for node in pair if set(pair) - {node} <= well}
    found = {node for node, times in met.items() if node not in well and (times > 1 or node in beside_well)}
    best = {node: min(_seconds(node, first, second)) for node in found}
    return {node for node in found if ALIKE * best[node] >= max(best.values())}


def _seconds(node: int, *rounds: Round) -> list[float]:
    """Return how long the node's pairs took; for ever where they did not end."""
    took = [each for seconds in rounds for pair, each in seconds.items() if node in pair]
    return [math.inf if each is None else each for each in took]


def check(facts: Facts) -> CheckResult:
    """Say which node is slow or silent."""
    fleet = facts.fleet
    if fleet is None:
        return LOOK.skipped("one node; for several: --nodes N --node I --address HOST:PORT on each of them")
    if fleet.missing:
        return LOOK.fail(fleet.missing, "start the same command on every node, and see that they reach the address")
    if len(fleet.rounds) < 2:
        return LOOK.skipped("the pairs were not measured")
    first, second = fleet.rounds[:2]
    bad, doubted = sorted(culprits(first, second)), suspects(first, second)
    both = [*first.items(), *second.items()]
    times = [took for _, took in both if took is not None]
    told = {"rounds": [{"-".join(map(str, pair)): took for pair, took in each.items()} for each in (first, second)]}
    if not times:
        return LOOK.fail("no two nodes could exchange anything", "look at the network, the firewall and the address",
                         **told)  # fmt: skip
    if bad:
        slowest = [took for pair, took in both if pair in doubted and set(pair) & set(bad)]
        how = "does not answer" if None in slowest else f"is {max(filter(None, slowest)) / min(times):.1f} times slower"
        return LOOK.fail(f"{_names(fleet.names, bad)} {how} with every partner; the others are well together",
                         f"leave {_names(fleet.names, bad)} out, and look at its network card, cable and load",
                         culprits=[fleet.names[node] for node in bad], **told)  # fmt: skip
    if doubted:
        return LOOK.warn(f"{_names(fleet.names, min(doubted))} were slow together, and both well with others",
                         "the link between them, or a passing load: run it again", **told)  # fmt: skip
    return LOOK.passed(f"{len(fleet.names)} nodes, the slowest pair {max(times) / min(times):.2f} times the quickest",
                       **told)  # fmt: skip


def _names(names: tuple[str, ...], nodes: Iterable[int]) -> str:
    told = [names[node] for node in nodes]
    return " and ".join(told[:SHOWN]) + (f" and {len(told) - SHOWN} more" if len(told) > SHOWN else "")
