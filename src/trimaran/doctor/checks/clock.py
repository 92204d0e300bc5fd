"""Clocks of nodes: leases, logs and traces compare times of several machines."""

from datetime import UTC, datetime

from trimaran.doctor.checks.result import CheckInfo, CheckResult
from trimaran.doctor.machine_facts import Facts

LOOK = CheckInfo("H012", "clock")
NO_EARLIER = datetime(2025, 1, 1, tzinfo=UTC).timestamp()  # than this program
# Seconds between nodes: torchrun's rendezvous drops a node at 15 s; logs that cannot be put in order come earlier.
WARN_SECONDS, FAIL_SECONDS = 1.0, 10.0


def check(facts: Facts) -> CheckResult:
    """Say how far the clocks of the nodes are apart; of one node, whether it knows the year."""
    now = facts.host.clock
    if now and now < NO_EARLIER:
        return LOOK.fail(f"this machine believes it is {datetime.fromtimestamp(now, UTC):%Y-%m-%d}",
                         "set the clock: chronyc makestep, or timedatectl set-ntp true")  # fmt: skip
    if facts.fleet is None or not facts.fleet.skews:
        return LOOK.passed("right year; nodes are compared with --nodes")
    names, skews = facts.fleet.names, facts.fleet.skews
    worst = max(skews, key=lambda node: abs(skews[node]))
    apart = f"{names[worst]} is {abs(skews[worst]):.2g} s {'ahead of' if skews[worst] > 0 else 'behind'} {names[0]}"
    fix = f"start chrony or ntpd on {names[worst]}: chronyc tracking"
    told = {"skews": dict(skews)}
    if abs(skews[worst]) > FAIL_SECONDS:
        return LOOK.fail(apart, fix, **told)
    if abs(skews[worst]) > WARN_SECONDS:
        return LOOK.warn(apart, fix, **told)
    return LOOK.passed(f"{len(names)} nodes within {abs(skews[worst]) * 1000:.1f} ms", **told)
