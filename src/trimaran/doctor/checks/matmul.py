"""H015: matmul throughput of each device, compared with its neighbours and its device model."""

from statistics import median

from trimaran.doctor.checks.result import CheckInfo, CheckResult, Problem
from trimaran.doctor.machine_facts import Facts

INFO = CheckInfo("H015", "matmul speed")
# Lowest accepted fractions of this machine's calibration, of the catalogue's best matmul, and of the median neighbour.
# A healthy H200 reaches 0.85 of the catalogue in the second we give it; device models with few measurements vary more.
MIN_FRACTION_OF_CALIBRATION, MIN_FRACTION_OF_CATALOGUE, MIN_FRACTION_OF_NEIGHBOURS = 0.7, 0.6, 0.9
FAIL_FRACTION_OF_NEIGHBOURS = 0.5  # such a device delays all others at every step


def check(facts: Facts) -> CheckResult:
    """List the devices whose matmuls are slow."""
    measured = facts.measured
    if measured is None or measured.missing:
        return INFO.skipped(measured.missing if measured else "--quick measures nothing")
    if measured.failures:
        what = "; ".join(f"{name}: {error}" for name, error in measured.failures.items())
        return INFO.fail(f"matmul failed on {what}", "see `nvidia-smi`, and exclude it with CUDA_VISIBLE_DEVICES")
    rates = measured.matmul_flops
    middle, slowest = median(rates.values()), min(rates, key=lambda name: rates[name])
    fix = "check its clocks and temperature under load, or exclude it with CUDA_VISIBLE_DEVICES"
    problems = [
        Problem(f"{name}: {rate / 1e12:.3g} TFLOP/s, the others {middle / 1e12:.3g}", fix,
                rate < FAIL_FRACTION_OF_NEIGHBOURS * middle)
        for name, rate in rates.items()
        if rate < MIN_FRACTION_OF_NEIGHBOURS * middle
    ]  # fmt: skip
    expected, min_fraction, source = expectation(facts)
    if expected and middle < min_fraction * expected:
        what = (
            f"{middle / 1e12:.3g} TFLOP/s, {_compared(middle, expected, source)}; expected at least {min_fraction:.0%}"
        )
        problems.append(Problem(what, "check for other programs on the device, then its clocks"))
    compared = f", {_compared(rates[slowest], expected, source)}" if expected else ""
    each = f" on each of {len(rates)} devices" if len(rates) > 1 else ""
    healthy = f"{rates[slowest] / 1e12:.3g} TFLOP/s in {measured.precision}{each}{compared}"
    return INFO.worst(problems, healthy, rates=dict(rates), expected=expected)


def expectation(facts: Facts) -> tuple[float, float, str]:
    """Return the rate that one device should reach, the lowest accepted fraction of it, and its source."""
    cluster, measured = facts.cluster, facts.measured
    if cluster is None or measured is None:
        return 0.0, 0.0, ""
    device = cluster.device
    if measured.precision in device.reached:
        ranks = cluster.devices_per_node if device.traits.shares_cores else 1  # the ranks of a CPU share its cores
        rate = device.reached[measured.precision] * ranks
        return rate, MIN_FRACTION_OF_CALIBRATION, "this machine's calibration"
    if not device.traits.has_data_sheet or "guess" in device.note:
        return 0.0, 0.0, ""
    return device.achievable_flops(measured.precision), MIN_FRACTION_OF_CATALOGUE, "best published result"


def _compared(rate: float, expected: float, source: str) -> str:
    return f"{rate / expected:.0%} of {expected / 1e12:.3g} ({source})"
