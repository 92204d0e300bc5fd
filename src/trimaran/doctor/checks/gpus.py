"""H002: the GPUs the run needs are present, equal, usable and free."""

from trimaran.core import show_bytes
from trimaran.doctor.checks.result import CheckInfo, CheckResult, Problem
from trimaran.doctor.machine_facts import Facts, Gpu

INFO = CheckInfo("H002", "GPUs")
MAX_USED_FRACTION = 0.05  # of a GPU's memory; more means that another program runs there, a desktop takes less


def check(facts: Facts) -> CheckResult:
    """List the GPUs, and what would keep a run from using them."""
    gpus, requirements = facts.gpus, facts.requirements
    if not gpus:
        if requirements and requirements.needs_gpus:
            # Not a failure: GPUs of other vendors have other tools, and the launcher counts devices itself.
            return INFO.warn(f"the run needs {requirements.ranks} GPUs, but NVIDIA's driver reports none",
                             "see `nvidia-smi`; without GPUs: --set cluster=auto")  # fmt: skip
        return INFO.skipped("no NVIDIA GPU found: ranks run on CPU cores")
    problems = [problem for gpu in gpus for problem in _problems(gpu)]
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        problems.append(Problem(f"the node mixes {' and '.join(names)}", "choose equal ones with CUDA_VISIBLE_DEVICES"))
    healthy = f"{len(gpus)} x {names[0]}, {show_bytes(min(gpu.memory for gpu in gpus))} each, none in use"
    return INFO.worst(
        problems, healthy, gpus=[{"index": gpu.index, "name": gpu.name, "uuid": gpu.uuid} for gpu in gpus]
    )


def _problems(gpu: Gpu) -> list[Problem]:
    name = f"GPU {gpu.index}"
    found: list[Problem] = []
    if gpu.memory and gpu.used > MAX_USED_FRACTION * gpu.memory:
        fix = "`nvidia-smi` lists the processes; or choose other GPUs with CUDA_VISIBLE_DEVICES"
        found.append(Problem(f"{name}: {show_bytes(gpu.used)} of {show_bytes(gpu.memory)} are in use", fix))
    if gpu.compute_mode.startswith("Prohibited"):
        found.append(Problem(f"{name}: compute mode is Prohibited",
                             f"nvidia-smi -i {gpu.index} -c DEFAULT", is_fatal=True))  # fmt: skip
    if gpu.mig == "Enabled":
        found.append(Problem(f"{name} is split into MIG slices, which have no peer access",
                             f"nvidia-smi -i {gpu.index} -mig 0, or use one slice per run"))  # fmt: skip
    if gpu.reset_required:
        found.append(Problem(f"{name} needs a reset", f"nvidia-smi -i {gpu.index} -r", is_fatal=True))
    return found
