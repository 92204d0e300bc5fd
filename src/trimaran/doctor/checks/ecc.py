"""ECC: memory errors that a GPU could not mend."""

from trimaran.doctor.checks.result import CheckInfo, CheckResult, Trouble
from trimaran.doctor.machine_facts import Facts, Gpu

LOOK = CheckInfo("H003", "ECC errors")


def check(facts: Facts) -> CheckResult:
    """Say which GPUs have errors in their memories. One that has no spare rows left is to be replaced."""
    told = [gpu for gpu in facts.gpus if gpu.ecc is not None]
    if not told:
        return LOOK.skipped("the driver tells nothing about ECC" if facts.gpus else "no NVIDIA GPU here")
    troubles = [trouble for gpu in told for trouble in _troubles(gpu)]
    switches = {gpu.ecc.enabled for gpu in told if gpu.ecc}
    if len(switches) > 1:
        off = [str(gpu.index) for gpu in told if gpu.ecc and gpu.ecc.enabled is False]
        troubles.append(Trouble(f"ECC is off on GPU {', '.join(off)} and on elsewhere",
                                f"nvidia-smi -i {','.join(off)} -e 1, then restart"))  # fmt: skip
    return LOOK.worst(troubles, f"none uncorrected on {len(told)} GPUs since the driver was loaded")


def _troubles(gpu: Gpu) -> list[Trouble]:
    name, ecc = f"GPU {gpu.index} ({gpu.uuid or gpu.name})", gpu.ecc
    assert ecc is not None
    found: list[Trouble] = []
    if ecc.is_worn:
        found.append(Trouble(f"{name} has no spare memory rows left for errors", "have the GPU replaced", True))
    if ecc.is_pending:
        found.append(Trouble(f"{name} waits for a reset to replace a bad memory row", f"nvidia-smi -i {gpu.index} -r"))
    if ecc.uncorrected:
        found.append(Trouble(f"{name} had {ecc.uncorrected} uncorrected memory errors",
                             "reset it; where they come again, have it replaced (dcgmi diag -r 3 tells)"))  # fmt: skip
    return found
