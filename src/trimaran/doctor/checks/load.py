"""The host itself: cores that a container gives, and programs that are at work already."""

from trimaran.doctor.checks.result import CheckInfo, CheckResult, Trouble
from trimaran.doctor.machine_facts import Facts

LOOK = CheckInfo("H019", "cores")


def check(facts: Facts) -> CheckResult:
    """Say whether the cores that this process sees are its own."""
    host = facts.host
    troubles: list[Trouble] = []
    if host.quota is not None and host.quota < host.cores - 0.5:
        troubles.append(Trouble(f"the container may use {host.quota:.2g} of the {host.cores} cores that it sees: "
                                "threads are put to sleep", "give it the cores (docker --cpus, Kubernetes limits), or "
                                f"name fewer ranks: --set cluster={max(1, int(host.quota))}xcpu"))  # fmt: skip
    if host.load > 1.5 * host.cores:
        troubles.append(Trouble(f"{host.load:.1f} programs want to run on {host.cores} cores already",
                                "see `top`: what is measured here, and the run, will be slower"))  # fmt: skip
    return LOOK.worst(troubles, f"{host.cores} cores, {host.load:.1f} in use", cores=host.cores, load=host.load)
