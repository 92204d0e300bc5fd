"""H012: the nodes' clocks agree, because leases, logs and traces compare times of several machines."""

from datetime import UTC, datetime

from trimaran.doctor.checks.result import CheckInfo, CheckResult
from trimaran.doctor.machine_facts import Facts

INFO = CheckInfo("H012", "clock")
EARLIEST_TIMESTAMP = datetime(2025, 1, 1, tzinfo=UTC).timestamp()  # older than this program
# Skew between nodes. At 1 s the order of log lines is lost; at 15 s torchrun's rendezvous drops a node.
WARN_SECONDS, FAIL_SECONDS = 1.0, 10.0


def check(facts: Facts) -> CheckResult:
    """Report the clock skew between nodes; on one node, whether the date is plausible."""
    now = facts.host.clock
    if now and now < EARLIEST_TIMESTAMP:
        return INFO.fail(f"this machine's clock says {datetime.fromtimestamp(now, UTC):%Y-%m-%d}",
                         "set the clock: chronyc makestep, or timedatectl set-ntp true")  # fmt: skip
    if facts.node_measurements is None or not facts.node_measurements.skews:
        return INFO.passed("the date is plausible; --nodes compares several nodes")
    names, skews = facts.node_measurements.names, facts.node_measurements.skews
    worst = max(skews, key=lambda node: abs(skews[node]))
    what = f"{names[worst]} is {abs(skews[worst]):.2g} s {'ahead of' if skews[worst] > 0 else 'behind'} {names[0]}"
    fix = f"start chrony or ntpd on {names[worst]}, then check it with `chronyc tracking`"
    evidence = {"skews": dict(skews)}
    if abs(skews[worst]) > FAIL_SECONDS:
        return INFO.fail(what, fix, **evidence)
    if abs(skews[worst]) > WARN_SECONDS:
        return INFO.warn(what, fix, **evidence)
    return INFO.passed(f"{len(names)} nodes agree within {abs(skews[worst]) * 1000:.1f} ms", **evidence)
