"""H006: network cards are up, equally fast, and close to the GPUs and to our cores."""

from collections.abc import Iterable

from trimaran.doctor.checks.result import CheckInfo, CheckResult, Problem
from trimaran.doctor.machine_facts import Facts, Interconnect, Nic

INFO = CheckInfo("H006", "network cards and NUMA")


def check(facts: Facts) -> CheckResult:
    """List the cards that are down or slow, and the GPUs that reach every card across sockets."""
    interconnect = facts.interconnect
    if interconnect is None:
        return INFO.skipped("--quick does not read network cards")
    problems = [*_cards(interconnect.nics), *_far_gpus(interconnect), *_far_cores(interconnect)]
    up = [nic for nic in interconnect.nics if nic.is_up]
    if not up and not problems:
        return INFO.passed("no network card is up (or Linux does not show it): one node only")
    rates = ", ".join(f"{nic.name} {nic.gigabits:g} Gb/s" if nic.gigabits else nic.name for nic in up)
    return INFO.worst(problems, rates, nics=[nic.name for nic in up])


def _cards(nics: tuple[Nic, ...]) -> list[Problem]:
    infiniband = [nic for nic in nics if nic.kind == "infiniband"]
    down = [nic.name for nic in infiniband if not nic.is_up]
    found: list[Problem] = []
    if down and len(down) < len(infiniband):
        found.append(Problem(f"{', '.join(down)} down, {len(infiniband) - len(down)} others up",
                             "check the cable and the subnet manager: `ibstat`"))  # fmt: skip
    rates = {nic.gigabits for nic in infiniband if nic.is_up and nic.gigabits}
    if len(rates) > 1:
        slow = [nic.name for nic in infiniband if nic.is_up and nic.gigabits == min(rates)]
        found.append(Problem(f"{', '.join(slow)} at {min(rates):g} Gb/s, others at {max(rates):g}",
                             "a ring is as slow as its slowest card: exclude them with NCCL_IB_HCA"))  # fmt: skip
    return found


def _far_gpus(interconnect: Interconnect) -> list[Problem]:
    """Return the GPUs that reach every card across sockets, if other GPUs have a card on their own socket."""
    is_near = [any(path != "SYS" for path in row) for row in interconnect.gpu_nic_paths]
    far = [str(gpu) for gpu, near in enumerate(is_near) if not near]
    if not far or len(far) == len(is_near):
        return []
    return [Problem(f"GPU {', '.join(far)} reaches every network card across sockets",
                    "expect less bandwidth between nodes; check NCCL_CROSS_NIC and the cards' slots")]  # fmt: skip


def _far_cores(interconnect: Interconnect) -> list[Problem]:
    wanted = {node for node in interconnect.gpu_numa if node >= 0}
    missing = sorted(wanted - interconnect.allowed_numa)
    if not missing or not interconnect.allowed_numa:
        return []
    return [Problem(f"this process may use cores of NUMA node {_join(interconnect.allowed_numa)} only, "
                    f"and GPUs are attached to {_join(missing)}",
                    "give the job cores on every socket (Slurm: --cpu-bind=none, or --gpu-bind=closest)")]  # fmt: skip


def _join(nodes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(nodes)))
