"""F003: the device waits for kernel launches."""

from collections.abc import Iterator
from dataclasses import replace

from trimaran.core import Finding, Seconds, show_seconds
from trimaran.cost import predict
from trimaran.cost.time_profiles import HostOverhead
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.predicted_gain import best_patch
from trimaran.doctor.step_breakdown import get_number, step_breakdown
from trimaran.planner.neighbours import fewer_launches, larger_micro_batches

MIN_LAUNCH_FRACTION = 0.15  # of compute time
MIN_FRACTION_OF_PREDICTION = 0.85  # of predicted compute: a faster run cannot be launch-bound
NO_HOST_OVERHEAD = HostOverhead(Seconds(0.0), Seconds(0.0), Seconds(0.0))


def launch_bound(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if launching many small kernels takes longer than running them.

    The cost model predicts compute with and without launch overhead; the run must be nearly as slow as with it.
    """
    measured, question = step_breakdown(evidence), evidence.planner_inputs()
    if measured is None or question is None or not question.cluster.device.traits.runs_async:
        return
    job, plan = question.job, evidence.plan
    free = replace(job, stack=replace(job.stack, time=replace(job.stack.time, host=NO_HOST_OVERHEAD)))
    with_host, without = (_compute_seconds(predict(each, question.cluster, plan).time) for each in (job, free))
    fraction = 1 - without / with_host
    if fraction < MIN_LAUNCH_FRACTION or measured.compute < MIN_FRACTION_OF_PREDICTION * with_host:
        return
    best = best_patch(evidence, measured, [*larger_micro_batches(plan), *fewer_launches(plan)])
    if best is None:
        return
    utilisation = [get_number(gpu, "utilisation") for each in evidence.samples for gpu in each.get("gpus") or ()]
    seen = [each for each in utilisation if each is not None]
    yield Finding(
        code="F003",
        severity="warning",
        verdict=f"the device waits for kernel launches about {fraction:.0%} of its compute time: kernels are too small "
        f"with a micro-batch of {plan.micro_batch}",
        culprit="the host",
        evidence={
            "compute_seconds": measured.compute,
            "predicted_with_host": with_host,
            "predicted_without_host": without,
            "micro_batch": plan.micro_batch,
            "grad_accum": plan.grad_accum,
            **({"gpu_utilisation": round(sum(seen) / len(seen), 3)} if seen else {}),
        },
        patch=best.patch,
        expected_effect=f"{best.effect} than {show_seconds(measured.step)}",
        gain=best.gain,
        confidence=0.75,
    )


def _compute_seconds(time: dict[str, Seconds]) -> float:
    return time["forward"] + time["backward"]
