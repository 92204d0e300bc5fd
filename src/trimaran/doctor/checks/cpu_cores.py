"""H019: the container's CPU quota, and cores that other programs use."""

from trimaran.doctor.checks.result import CheckInfo, CheckResult, Problem
from trimaran.doctor.machine_facts import Facts

INFO = CheckInfo("H019", "cores")


def check(facts: Facts) -> CheckResult:
    """Report whether this process can really use the cores that it sees."""
    host = facts.host
    problems: list[Problem] = []
    if host.quota is not None and host.quota < host.cores - 0.5:
        problems.append(Problem(f"the container's CPU quota is {host.quota:.2g} of the {host.cores} cores it sees: "
                                "its threads are throttled", "raise the quota (docker --cpus, Kubernetes limits), or "
                                f"use fewer ranks: --set cluster={max(1, int(host.quota))}xcpu"))  # fmt: skip
    if host.load > 1.5 * host.cores:
        problems.append(Problem(f"the load average is {host.load:.1f} on {host.cores} cores",
                                "see `top`: measurements and the run will be slower"))  # fmt: skip
    return INFO.worst(problems, f"{host.cores} cores, {host.load:.1f} in use", cores=host.cores, load=host.load)
