"""H017: measured all-reduce bus bandwidth, compared with what the links should give."""

from trimaran.doctor.checks.result import CheckInfo, CheckResult
from trimaran.doctor.machine_facts import Facts
from trimaran.hardware import Cluster

INFO = CheckInfo("H017", "all-reduce speed")
# Fractions of the expected bandwidth. A ring reaches 0.85 of what the catalogue says a link has.
MIN_FRACTION_OF_CALIBRATION, MIN_FRACTION_OF_LINK, FAIL_FRACTION = 0.7, 0.5, 0.2


def bus_bandwidth(num_bytes: int, ranks: int, seconds: float) -> float:
    """Return the bytes per second that each link carries in an all-reduce of `num_bytes`: 2 (n - 1) / n * bytes / s."""
    return 2 * (ranks - 1) / ranks * num_bytes / seconds


def check(facts: Facts) -> CheckResult:
    """Compare the bus bandwidth between the ranks of this machine with the expected one."""
    measured = facts.measured
    if measured is None or measured.missing:
        return INFO.skipped(measured.missing if measured else "--quick measures nothing")
    answer = measured.all_reduce
    if "seconds" not in answer:
        return INFO.skipped("the all-reduce did not finish" if answer else "only one device, so there is no all-reduce")
    rate = bus_bandwidth(answer["bytes"], answer["ranks"], answer["seconds"])
    what = f"{rate / 1e9:.3g} GB/s bus bandwidth over {answer['ranks']} {answer['backend']} ranks"
    expected, min_fraction, source = _expected(facts.cluster, answer["ranks"])
    evidence = {"bus_bandwidth": rate, "expected": expected}
    if not expected:
        return INFO.passed(f"{what}; run `trimaran bench calibrate` to have a value to compare with", **evidence)
    what = f"{what}, {source} {expected / 1e9:.3g} GB/s"
    fix = "check that NVLink is up (`nvidia-smi nvlink -s`), P2P is allowed and no other program uses the links"
    if answer["backend"] == "gloo":
        return INFO.passed(what, **evidence) if rate >= min_fraction * expected else INFO.warn(
            what, "check with `top` whether another program uses this machine", **evidence)  # fmt: skip
    if rate < FAIL_FRACTION * expected:
        return INFO.fail(what, fix, **evidence)
    return INFO.passed(what, **evidence) if rate >= min_fraction * expected else INFO.warn(what, fix, **evidence)


def _expected(cluster: Cluster | None, ranks: int) -> tuple[float, float, str]:
    """Return the bandwidth of the link between this many ranks, the lowest fraction of it to accept, and its source."""
    if cluster is None:
        return 0.0, 0.0, ""
    link = next((each for each in cluster.levels if each.devices >= ranks), cluster.levels[-1])
    if "all_reduce" in link.reached:
        return link.reached["all_reduce"], MIN_FRACTION_OF_CALIBRATION, "calibration measured"
    if not cluster.device.traits.has_data_sheet:
        return 0.0, 0.0, ""
    return link.bandwidth, MIN_FRACTION_OF_LINK, f"{link.name} has"
