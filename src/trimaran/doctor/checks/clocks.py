"""Clocks: what keeps a GPU from the speed that it was sold with."""

from trimaran.doctor.checks.result import CheckInfo, CheckResult, Trouble
from trimaran.doctor.machine_facts import Facts, GpuClocks

LOOK = CheckInfo("H004", "clocks and power")
BELOW = 0.95  # of the usual, from which on a limit was lowered on purpose
# The driver's words for why it lowers a clock, by how they end; power capping under load is how GPUs work.
BRAKES = {
    "hw_slowdown": "the hardware slows it down",
    "hw_thermal_slowdown": "it is too hot (hardware)",
    "sw_thermal_slowdown": "it is too hot",
    "hw_power_brake_slowdown": "the power supply brakes it",
}


def check(facts: Facts) -> CheckResult:
    """Say which GPUs are throttled, limited below their default, or on a narrow PCIe slot."""
    told = {gpu.index: gpu.pace for gpu in facts.gpus if gpu.pace}
    if not told:
        return LOOK.skipped("the quick look leaves clocks out" if facts.gpus else "no NVIDIA GPU here")
    troubles = [trouble for index, pace in told.items() for trouble in _troubles(index, pace)]
    return LOOK.worst(troubles, f"{len(told)} GPUs at their default limits, none throttled")


def _troubles(index: int, pace: GpuClocks) -> list[Trouble]:
    found = [
        Trouble(f"GPU {index}: {words}", "mend cooling or power supply; `nvidia-smi -q -d PERFORMANCE` shows it")
        for brake, words in BRAKES.items()
        if brake in pace.brakes
    ]
    if _lowered(pace.power_limit, pace.default_power_limit):
        found.append(Trouble(f"GPU {index}: power limit {pace.power_limit:.0f} W, its default is "
                             f"{pace.default_power_limit:.0f} W",
                             f"nvidia-smi -i {index} -pl {pace.default_power_limit:.0f}"))  # fmt: skip
    if _lowered(pace.clock, pace.default_clock):
        found.append(Trouble(f"GPU {index}: clock held at {pace.clock:.0f} MHz, its default is "
                             f"{pace.default_clock:.0f} MHz", f"nvidia-smi -i {index} -rac"))  # fmt: skip
    if _lowered(pace.pcie_width, pace.max_pcie_width):
        found.append(Trouble(f"GPU {index}: PCIe x{pace.pcie_width} of x{pace.max_pcie_width}",
                             "reseat the card, or look at the riser and the slot"))  # fmt: skip
    return found


def _lowered(now: float | None, usual: float | None) -> bool:
    return now is not None and usual is not None and now < BELOW * usual
