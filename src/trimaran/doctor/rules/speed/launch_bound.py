"""F003: the device waits for the host to start its kernels."""

from collections.abc import Iterator
from dataclasses import replace

from trimaran.core import Finding, Seconds, show_seconds
from trimaran.cost import predict
from trimaran.cost.time_profiles import HostOverhead
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.predicted_gain import best_of, larger_micro_batches
from trimaran.doctor.step_breakdown import measure, number

SHARE = 0.15  # of computing that the host costs
AGREES = 0.85  # times what the model says: a run that is faster than a host-bound one can be is none
AT_ONCE = HostOverhead(Seconds(0.0), Seconds(0.0), Seconds(0.0))


def launch_bound(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when many small kernels keep the host busier than the device.

    The model says what computing would take if kernels started by themselves; the run must be at least nearly as slow
    as the model says that it is with a host.
    """
    measured, question = measure(evidence), evidence.ask()
    if measured is None or question is None or question.cluster.device.kind == "cpu":
        return
    job, plan = question.job, evidence.plan
    free = replace(job, stack=replace(job.stack, time=replace(job.stack.time, host=AT_ONCE)))
    with_host, without = (_computing(predict(each, question.cluster, plan).time) for each in (job, free))
    share = 1 - without / with_host
    if share < SHARE or measured.compute < AGREES * with_host:
        return
    patches = [{"plan.compile": True}] if not plan.compile else []
    remedy = best_of(evidence, measured, [*larger_micro_batches(plan), *patches])
    if remedy is None:
        return
    utilisation = [number(gpu, "utilisation") for each in evidence.samples for gpu in each.get("gpus") or ()]
    seen = [each for each in utilisation if each is not None]
    yield Finding(
        code="F003",
        severity="warning",
        verdict=f"the device waits for the host to start its kernels about {share:.0%} of its computing time: they are "
        f"too small at a micro-batch of {plan.micro_batch}",
        culprit="the host",
        evidence={
            "compute_seconds": measured.compute,
            "predicted_with_host": with_host,
            "predicted_without_host": without,
            "micro_batch": plan.micro_batch,
            "grad_accum": plan.grad_accum,
            **({"gpu_utilisation": round(sum(seen) / len(seen), 3)} if seen else {}),
        },
        patch=remedy.patch,
        expected_effect=f"{remedy.effect}: now {show_seconds(measured.step)}",
        gain=remedy.gain,
        confidence=0.75,
    )


def _computing(time: dict[str, Seconds]) -> float:
    return time["forward"] + time["backward"]
