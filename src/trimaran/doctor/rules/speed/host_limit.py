"""F016: the host limits the step."""

from collections.abc import Iterator
from statistics import fmean, median

from trimaran.core import Finding, Plan, show_seconds
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.predicted_gain import best_patch
from trimaran.doctor.rules.speed.launch_bound import launch_bound
from trimaran.doctor.step_breakdown import get_number, steady_steps, step_breakdown
from trimaran.planner.neighbours import fewer_launches, larger_micro_batches

MIN_BOUND_FRACTION = 0.8  # of the steps, in which the device waited for its host
MIN_HOST_FRACTION = 0.75  # of a step without data and checkpoints
MAX_HOST_SECONDS = 0.015  # that issuing a step takes where no setting is left to change


def host_limit(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if the host takes as long to issue a step as the step takes, and the device waits for it.

    Both are measured. F003, which compares with a prediction, says the same where it applies. No line of a CPU run says
    that its device has waited: there the host is the device.
    """
    steps, measured = steady_steps(evidence), step_breakdown(evidence)
    host = [seconds for each in steps if (seconds := get_number(each, "host_seconds")) is not None]
    if measured is None or not host:
        return
    bound_fraction = fmean(each.get("host_bound") is True for each in steps)
    host_seconds, computing = median(host), measured.step - measured.data - measured.checkpoint
    if bound_fraction < MIN_BOUND_FRACTION or host_seconds < MIN_HOST_FRACTION * computing:
        return
    settings = _settings(evidence.plan)
    if any(launch_bound(evidence)) or (not settings and host_seconds <= MAX_HOST_SECONDS):
        return
    best = best_patch(evidence, measured, [*larger_micro_batches(evidence.plan), *fewer_launches(evidence.plan)])
    yield Finding(
        code="F016",
        severity="warning",
        verdict=f"the host limits the step: it takes {show_seconds(host_seconds)} to issue a step of "
        f"{show_seconds(measured.step)}, and the device waits for it",
        culprit="the host",
        evidence={
            "host_seconds": host_seconds,
            "step_seconds": measured.step,
            "bound_share": round(bound_fraction, 4),
            "micro_batch": evidence.plan.micro_batch,
            "grad_accum": evidence.plan.grad_accum,
        },
        patch=best.patch if best else {},
        fix="" if best else _fix(settings),
        expected_effect=best.effect if best else "",
        gain=best.gain if best else None,
        confidence=0.8,
    )


def _settings(plan: Plan) -> list[str]:
    """Return the settings that may let the host issue a step faster, as text."""
    switches = [f"{field}={str(value).lower()}" for patch in fewer_launches(plan) for field, value in patch.items()]
    return [*switches, *(["a larger plan.micro_batch with less plan.grad_accum"] if plan.grad_accum > 1 else [])]


def _fix(settings: list[str]) -> str:
    if settings:
        return f"try {', or '.join(settings)}"
    return (
        "look for other processes on the host's cores, and with `trimaran profile` for what the host does in a step; a "
        "larger train.global_batch with a larger micro-batch gives the device more to do"
    )
