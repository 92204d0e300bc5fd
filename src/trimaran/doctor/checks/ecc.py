"""H003: uncorrected ECC memory errors of GPUs."""

from trimaran.doctor.checks.result import CheckInfo, CheckResult, Problem
from trimaran.doctor.machine_facts import Facts, Gpu

INFO = CheckInfo("H003", "ECC errors")


def check(facts: Facts) -> CheckResult:
    """List the GPUs with memory errors. A GPU without spare rows has to be replaced."""
    gpus = [gpu for gpu in facts.gpus if gpu.ecc is not None]
    if not gpus:
        return INFO.skipped("the driver reports no ECC state" if facts.gpus else "no NVIDIA GPU found")
    problems = [problem for gpu in gpus for problem in _problems(gpu)]
    modes = {gpu.ecc.enabled for gpu in gpus if gpu.ecc}
    if len(modes) > 1:
        off = [str(gpu.index) for gpu in gpus if gpu.ecc and gpu.ecc.enabled is False]
        problems.append(Problem(f"ECC is off on GPU {', '.join(off)} and on for the others",
                                f"nvidia-smi -i {','.join(off)} -e 1, then reboot"))  # fmt: skip
    return INFO.worst(problems, f"no uncorrected errors on {len(gpus)} GPUs since the driver was loaded")


def _problems(gpu: Gpu) -> list[Problem]:
    name, ecc = f"GPU {gpu.index} ({gpu.uuid or gpu.name})", gpu.ecc
    assert ecc is not None
    found: list[Problem] = []
    if ecc.spare_rows_exhausted:
        found.append(Problem(f"{name} has no spare memory rows left", "have the GPU replaced", True))
    if ecc.reset_pending:
        found.append(Problem(f"{name} needs a reset to remap a bad memory row", f"nvidia-smi -i {gpu.index} -r"))
    if ecc.uncorrected:
        found.append(Problem(f"{name} had {ecc.uncorrected} uncorrected memory errors",
                             "reset it; if errors return, run `dcgmi diag -r 3` and have it replaced"))  # fmt: skip
    return found
