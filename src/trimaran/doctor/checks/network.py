"""Network cards: all up, equally fast, and near to the GPUs and to our cores."""

from collections.abc import Iterable

from trimaran.doctor.checks.result import CheckInfo, CheckResult, Trouble
from trimaran.doctor.machine_facts import Facts, Nic, Wiring

LOOK = CheckInfo("H006", "network cards and NUMA")


def check(facts: Facts) -> CheckResult:
    """Say which cards are down or slow, and which GPUs reach none without crossing sockets."""
    wiring = facts.wiring
    if wiring is None:
        return LOOK.skipped("the quick look leaves cards out")
    troubles = [*_cards(wiring.nics), *_far_gpus(wiring), *_far_cores(wiring)]
    up = [nic for nic in wiring.nics if nic.is_up]
    if not up and not troubles:
        return LOOK.passed("no card leads out of this machine (or Linux does not show it): one node only")
    rates = ", ".join(f"{nic.name} {nic.gigabits:g} Gb/s" if nic.gigabits else nic.name for nic in up)
    return LOOK.worst(troubles, rates, nics=[nic.name for nic in up])


def _cards(nics: tuple[Nic, ...]) -> list[Trouble]:
    fabric = [nic for nic in nics if nic.kind == "infiniband"]
    down = [nic.name for nic in fabric if not nic.is_up]
    found: list[Trouble] = []
    if down and len(down) < len(fabric):
        found.append(Trouble(f"{', '.join(down)} down, {len(fabric) - len(down)} others up",
                             "look at the cable and the subnet manager: `ibstat`"))  # fmt: skip
    rates = {nic.gigabits for nic in fabric if nic.is_up and nic.gigabits}
    if len(rates) > 1:
        slow = [nic.name for nic in fabric if nic.is_up and nic.gigabits == min(rates)]
        found.append(Trouble(f"{', '.join(slow)} at {min(rates):g} Gb/s, others at {max(rates):g}",
                             "a ring is as slow as its slowest card: leave them out with NCCL_IB_HCA"))  # fmt: skip
    return found


def _far_gpus(wiring: Wiring) -> list[Trouble]:
    """Return the GPUs whose every way to a card crosses sockets, where others have a near one."""
    nearest = [any(way != "SYS" for way in row) for row in wiring.to_nics]
    far = [str(gpu) for gpu, is_near in enumerate(nearest) if not is_near]
    if not far or len(far) == len(nearest):
        return []
    return [Trouble(f"GPU {', '.join(far)} reaches every network card across sockets",
                    "expect less between nodes there; NCCL_CROSS_NIC and the slots of the cards matter")]  # fmt: skip


def _far_cores(wiring: Wiring) -> list[Trouble]:
    wanted = {node for node in wiring.gpu_numa if node >= 0}
    missing = sorted(wanted - wiring.own_numa)
    if not missing or not wiring.own_numa:
        return []
    return [Trouble(f"we may run on the cores of NUMA node {_list(wiring.own_numa)} only, "
                    f"and GPUs hang on {_list(missing)}",
                    "give the job cores on every socket (Slurm: --cpu-bind=none, or --gpu-bind=closest)")]  # fmt: skip


def _list(nodes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(nodes)))
