"""All-reduce: the bus bandwidth beside what the links should give. It is 2 (n - 1) / n * bytes / seconds."""

from trimaran.doctor.checks.result import CheckInfo, CheckResult
from trimaran.doctor.machine_facts import Facts
from trimaran.hardware import Cluster

LOOK = CheckInfo("H017", "all-reduce, speed")
# Of what was measured here before, and of the catalogue's links: rings reach 0.85 of them.
OF_MEASURED, OF_LINK, BROKEN = 0.7, 0.5, 0.2


def bus_bandwidth(num_bytes: int, ranks: int, seconds: float) -> float:
    """Return the bytes a second that each link carries in an all-reduce of `num_bytes` on each rank."""
    return 2 * (ranks - 1) / ranks * num_bytes / seconds


def check(facts: Facts) -> CheckResult:
    """Say whether sums are as fast as the links between the ranks of this machine."""
    measured = facts.measured
    if measured is None or measured.missing:
        return LOOK.skipped(measured.missing if measured else "the quick look measures nothing")
    answer = measured.reduce
    if "seconds" not in answer:
        return LOOK.skipped("the sums did not come to an end" if answer else "one device: nothing to sum")
    rate = bus_bandwidth(answer["bytes"], answer["ranks"], answer["seconds"])
    said = f"{rate / 1e9:.3g} GB/s bus bandwidth, {answer['ranks']} {answer['backend']} ranks"
    expected, least, source = _expected(facts.cluster, answer["ranks"])
    told = {"bus_bandwidth": rate, "expected": expected}
    if not expected:
        return LOOK.passed(f"{said}; nothing to compare with before `trimaran bench calibrate`", **told)
    said = f"{said}, {source} {expected / 1e9:.3g}"
    fix = "is NVLink up (`nvidia-smi nvlink -s`), is P2P allowed, does another program use the links?"
    if answer["backend"] == "gloo":
        return LOOK.passed(said, **told) if rate >= least * expected else LOOK.warn(
            said, "does another program use this machine?", **told)  # fmt: skip
    if rate < BROKEN * expected:
        return LOOK.fail(said, fix, **told)
    return LOOK.passed(said, **told) if rate >= least * expected else LOOK.warn(said, fix, **told)


def _expected(cluster: Cluster | None, ranks: int) -> tuple[float, float, str]:
    """Return the bandwidth of the link that joins so many ranks, the share of it that is well, and its source."""
    if cluster is None:
        return 0.0, 0.0, ""
    link = next((each for each in cluster.levels if each.devices >= ranks), cluster.levels[-1])
    if "all_reduce" in link.reached:
        return link.reached["all_reduce"], OF_MEASURED, "measured before:"
    return (0.0, 0.0, "") if cluster.device.kind == "cpu" else (link.bandwidth, OF_LINK, f"{link.name} has")
