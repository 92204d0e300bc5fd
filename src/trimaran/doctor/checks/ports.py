"""Ports: ranks find each other over sockets of this machine."""

from trimaran.doctor.checks.result import CheckInfo, CheckResult
from trimaran.doctor.machine_facts import Facts

LOOK = CheckInfo("H013", "ports")


def check(facts: Facts) -> CheckResult:
    """Say whether a program here can reach another through the loopback, and whether the recipe's ports are free."""
    if facts.host.loopback:
        return LOOK.fail(f"programs cannot reach each other here: {facts.host.loopback}",
                         "ip link set lo up; see the firewall's rules for lo")  # fmt: skip
    taken = facts.work.ports if facts.work else ()
    if taken:
        ports = ", ".join(map(str, taken))
        return LOOK.warn(f"somebody listens at port {ports}, which the recipe's telemetry wants",
                         f"choose another: --set telemetry.prometheus.port={taken[0] + 1}")  # fmt: skip
    return LOOK.passed("programs reach each other through the loopback")
