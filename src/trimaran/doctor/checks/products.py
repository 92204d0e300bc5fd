"""Matrix products: each device as fast as its kind, and as its neighbours."""

from statistics import median

from trimaran.doctor.checks.result import CheckInfo, CheckResult, Trouble
from trimaran.doctor.machine_facts import Facts

LOOK = CheckInfo("H015", "matrix products")
# Of what was measured on this machine, of the catalogue's best product, and of the neighbours' median. A well H200 has
# 0.85 of the catalogue's in the second that we give it; kinds that few have measured are further away.
OF_MEASURED, OF_GUESS, OF_OTHERS = 0.7, 0.6, 0.9
HALF = 0.5  # of the neighbours: such a device holds all others up


def check(facts: Facts) -> CheckResult:
    """Say which devices are slow in matrix products."""
    measured = facts.measured
    if measured is None or measured.missing:
        return LOOK.skipped(measured.missing if measured else "the quick look measures nothing")
    if measured.failures:
        what = "; ".join(f"{name}: {words}" for name, words in measured.failures.items())
        return LOOK.fail(f"no product on {what}", "see `nvidia-smi`, and leave it out with CUDA_VISIBLE_DEVICES")
    rates = measured.products
    usual, slowest = median(rates.values()), min(rates, key=lambda name: rates[name])
    look = "look at its clocks and temperature under load, or leave it out with CUDA_VISIBLE_DEVICES"
    troubles = [
        Trouble(f"{name}: {rate / 1e12:.3g} TFLOP/s, the others {usual / 1e12:.3g}", look, rate < HALF * usual)
        for name, rate in rates.items()
        if rate < OF_OTHERS * usual
    ]
    expected, share, source = expectation(facts)
    if expected and usual < share * expected:
        words = f"{usual / 1e12:.3g} TFLOP/s, {_beside(usual, expected, source)}, and {share:.0%} is the least"
        troubles.append(Trouble(words, "is something else running? else see the clocks"))
    beside = f", {_beside(rates[slowest], expected, source)}" if expected else ""
    healthy = f"{rates[slowest] / 1e12:.3g} TFLOP/s in {measured.precision} on each of {len(rates)}{beside}"
    if len(rates) == 1:
        healthy = f"{rates[slowest] / 1e12:.3g} TFLOP/s in {measured.precision}{beside}"
    return LOOK.worst(troubles, healthy, rates=dict(rates), expected=expected)


def expectation(facts: Facts) -> tuple[float, float, str]:
    """Return the rate that one device should reach, the share of it that is well, and where it comes from."""
    cluster, measured = facts.cluster, facts.measured
    if cluster is None or measured is None:
        return 0.0, 0.0, ""
    device = cluster.device
    if measured.precision in device.reached:
        whole = cluster.devices_per_node if device.kind == "cpu" else 1  # the ranks of a CPU share its cores
        return device.reached[measured.precision] * whole, OF_MEASURED, "`trimaran bench calibrate` measured here"
    if device.kind == "cpu" or "guess" in device.note:
        return 0.0, 0.0, ""
    return device.achievable_flops(measured.precision), OF_GUESS, "others measured at best"


def _beside(rate: float, expected: float, source: str) -> str:
    return f"{rate / expected:.0%} of the {expected / 1e12:.3g} that {source}"
