"""Memory: the recipe's plan beside what the devices have free now."""

from trimaran.core import Bytes, show_bytes
from trimaran.doctor.checks.result import CheckInfo, CheckResult
from trimaran.doctor.machine_facts import Facts

LOOK = CheckInfo("H014", "memory for the plan")


def check(facts: Facts) -> CheckResult:
    """Say whether the plan fits into what is free. It fails only where even the low end of the prediction does not.

    The memory of a CPU can be given back by its holders at any time, so that it is never a failure there.
    """
    work = facts.work
    if work is None:
        return LOOK.skipped("name a recipe with --recipe")
    if work.refusal:
        return LOOK.fail(work.refusal, work.remedy)
    free = free_bytes(facts)
    if free is None or not work.device_bytes:
        return LOOK.skipped("the driver does not tell what is free" if free is None else "the plan has no prediction")
    need, low = work.device_bytes, work.device_bytes * (1 - work.error)
    kind = "GPU" if work.kind == "cuda" else "rank"
    said = f"the plan takes {show_bytes(need)} a {kind}, {show_bytes(free)} are free"
    told = {"need": need, "free": free, "error": work.error}
    if low > free and work.kind == "cuda":
        return LOOK.fail(
            said, "end what else runs on the GPUs (`nvidia-smi`), or plan with less: `trimaran plan`", **told
        )
    if need > free:
        return LOOK.warn(f"{said}, which is within the error of the prediction" if low <= free else said,
                         "end other programs, or plan with less: `trimaran plan`",
                         **told)  # fmt: skip
    return LOOK.passed(said, **told)


def free_bytes(facts: Facts) -> Bytes | None:
    """Return what the fullest device of the run has free."""
    work = facts.work
    assert work is not None
    if work.kind == "cpu":
        return Bytes(facts.host.memory_free // work.ranks_here)
    here = facts.gpus[: work.ranks_here]
    return Bytes(min(gpu.memory - gpu.used for gpu in here)) if here and all(gpu.memory for gpu in here) else None
