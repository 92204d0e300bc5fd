"""H004: GPUs that are throttled, limited below their defaults, or on a narrow PCIe link."""

from trimaran.doctor.checks.result import CheckInfo, CheckResult, Problem
from trimaran.doctor.machine_facts import Facts, GpuClocks

INFO = CheckInfo("H004", "clocks and power")
MIN_FRACTION_OF_DEFAULT = 0.95  # below this, someone lowered the limit on purpose
# Throttle reasons of the driver that point to a fault. Power capping under load is normal and not listed.
THROTTLE_TEXTS = {
    "hw_slowdown": "hardware slowdown",
    "hw_thermal_slowdown": "hardware thermal slowdown",
    "sw_thermal_slowdown": "thermal slowdown",
    "hw_power_brake_slowdown": "power brake slowdown (power supply)",
}


def check(facts: Facts) -> CheckResult:
    """List the GPUs that are throttled, limited below their default, or on a narrow PCIe link."""
    clocks_by_gpu = {gpu.index: gpu.clocks for gpu in facts.gpus if gpu.clocks}
    if not clocks_by_gpu:
        return INFO.skipped("--quick does not read clocks" if facts.gpus else "no NVIDIA GPU found")
    problems = [problem for index, clocks in clocks_by_gpu.items() for problem in _problems(index, clocks)]
    return INFO.worst(problems, f"{len(clocks_by_gpu)} GPUs at their default limits, none throttled")


def _problems(index: int, clocks: GpuClocks) -> list[Problem]:
    found = [
        Problem(f"GPU {index}: {text}", "fix cooling or power supply; see `nvidia-smi -q -d PERFORMANCE`")
        for reason, text in THROTTLE_TEXTS.items()
        if reason in clocks.throttle_reasons
    ]
    if _is_lowered(clocks.power_limit, clocks.default_power_limit):
        found.append(Problem(f"GPU {index}: power limit {clocks.power_limit:.0f} W, default "
                             f"{clocks.default_power_limit:.0f} W",
                             f"nvidia-smi -i {index} -pl {clocks.default_power_limit:.0f}"))  # fmt: skip
    if _is_lowered(clocks.clock, clocks.default_clock):
        found.append(Problem(f"GPU {index}: clock set to {clocks.clock:.0f} MHz, default "
                             f"{clocks.default_clock:.0f} MHz", f"nvidia-smi -i {index} -rac"))  # fmt: skip
    if _is_lowered(clocks.pcie_width, clocks.max_pcie_width):
        found.append(Problem(f"GPU {index}: PCIe x{clocks.pcie_width} of x{clocks.max_pcie_width}",
                             "reseat the card, and check the riser and the slot"))  # fmt: skip
    return found


def _is_lowered(value: float | None, default: float | None) -> bool:
    return value is not None and default is not None and value < MIN_FRACTION_OF_DEFAULT * default
