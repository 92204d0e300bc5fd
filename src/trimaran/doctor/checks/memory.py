"""H014: the recipe's plan fits into the memory that is free now."""

from trimaran.core import Bytes, show_bytes
from trimaran.doctor.checks.result import CheckInfo, CheckResult
from trimaran.doctor.machine_facts import Facts

INFO = CheckInfo("H014", "memory for the plan")


def check(facts: Facts) -> CheckResult:
    """Report whether the plan fits. It fails only if even the low end of the prediction does not.

    On a CPU it never fails, because other programs may free host memory at any time.
    """
    requirements = facts.requirements
    if requirements is None:
        return INFO.skipped("name a recipe with --recipe")
    if requirements.refusal:
        return INFO.fail(requirements.refusal, requirements.remedy)
    free = free_bytes(facts)
    if free is None or not requirements.device_bytes:
        return INFO.skipped("the driver reports no free memory" if free is None else "the plan has no prediction")
    need, low = requirements.device_bytes, requirements.device_bytes * (1 - requirements.error)
    kind = "GPU" if requirements.needs_gpus else "rank"
    what = f"the plan needs {show_bytes(need)} per {kind}, {show_bytes(free)} are free"
    evidence = {"need": need, "free": free, "error": requirements.error}
    if low > free and requirements.needs_gpus:
        fix = "stop other programs on the GPUs (`nvidia-smi`), or make a plan that needs less: `trimaran plan`"
        return INFO.fail(what, fix, **evidence)
    if need > free:
        return INFO.warn(f"{what}, which is within the error of the prediction" if low <= free else what,
                         "stop other programs, or make a plan that needs less: `trimaran plan`",
                         **evidence)  # fmt: skip
    return INFO.passed(what, **evidence)


def free_bytes(facts: Facts) -> Bytes | None:
    """Return the free memory of the fullest device of the run; None if the driver does not report it."""
    requirements = facts.requirements
    assert requirements is not None
    if not requirements.needs_gpus:
        return Bytes(facts.host.memory_free // requirements.ranks_here)
    gpus = facts.gpus[: requirements.ranks_here]
    return Bytes(min(gpu.memory - gpu.used for gpu in gpus)) if gpus and all(gpu.memory for gpu in gpus) else None
