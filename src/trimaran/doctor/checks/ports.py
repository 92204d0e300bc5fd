"""H013: the loopback interface works, and the recipe's ports are free."""

from trimaran.doctor.checks.result import CheckInfo, CheckResult
from trimaran.doctor.machine_facts import Facts

INFO = CheckInfo("H013", "ports")


def check(facts: Facts) -> CheckResult:
    """Report whether processes reach each other over loopback, and whether the recipe's ports are free."""
    if facts.host.loopback:
        return INFO.fail(f"processes cannot reach each other over loopback: {facts.host.loopback}",
                         "ip link set lo up; check the firewall's rules for lo")  # fmt: skip
    taken = facts.requirements.ports if facts.requirements else ()
    if taken:
        ports = ", ".join(map(str, taken))
        return INFO.warn(f"port {ports}, which the recipe's telemetry uses, is taken by another process",
                         f"choose another: --set telemetry.prometheus.port={taken[0] + 1}")  # fmt: skip
    return INFO.passed("processes reach each other over loopback")
