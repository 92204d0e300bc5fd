"""Rules about computing: kernels, compilation, the host that launches them, and predictions that are off."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from statistics import fmean, median

from trimaran.core import Finding, Prediction, Seconds, show_bytes, show_seconds
from trimaran.cost import HostOverhead, predict
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.predicted_gain import Patch, best_patch, remedy_fields
from trimaran.doctor.step_breakdown import (
    StepBreakdown,
    get_number,
    get_numbers,
    steady_steps,
    step_breakdown,
    warm_steps,
)
from trimaran.planner import fewer_launches, larger_micro_batches

MIN_LAUNCH_FRACTION = 0.15  # of compute time
MIN_FRACTION_OF_PREDICTION = 0.85  # of predicted compute: a faster run cannot be launch-bound
NO_HOST_OVERHEAD = HostOverhead(Seconds(0.0), Seconds(0.0), Seconds(0.0))


def launch_bound(evidence: Evidence) -> Iterator[Finding]:
    """Yield F003 if launching many small kernels takes longer than running them."""
    # The cost model predicts compute with and without launch overhead; the run must be nearly as slow as with it.
    measured, question = step_breakdown(evidence), evidence.planner_inputs()
    if measured is None or question is None or not question.cluster.device.traits.runs_async:
        return
    job, plan = question.job, evidence.plan
    free = replace(job, stack=replace(job.stack, time=replace(job.stack.time, host=NO_HOST_OVERHEAD)))
    times = (predict(each, question.cluster, plan).time for each in (job, free))
    with_host, without = (time["forward"] + time["backward"] for time in times)
    fraction = 1 - without / with_host
    if fraction < MIN_LAUNCH_FRACTION or measured.compute < MIN_FRACTION_OF_PREDICTION * with_host:
        return
    best = best_patch(evidence, measured, [*larger_micro_batches(plan), *fewer_launches(plan)])
    if best is None:
        return
    seen = get_numbers((gpu for each in evidence.samples for gpu in each.get("gpus") or ()), "utilisation")
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


MIN_BOUND_FRACTION = 0.8  # of the steps, in which the device waited for its host
MIN_HOST_FRACTION = 0.75  # of a step without data and checkpoints
MAX_HOST_SECONDS = 0.015  # that issuing a step takes where no setting is left to change
BUSY_HOST_FIX = (
    "look for other processes on the host's cores, and with `trimaran profile` for what the host does in a step; a "
    "larger train.global_batch with a larger micro-batch gives the device more to do"
)


def host_limit(evidence: Evidence) -> Iterator[Finding]:
    """Yield F016 if the host takes as long to issue a step as the step takes, and the device waits for it."""
    # Both are measured. F003, which compares with a prediction, says the same where it applies. No line of a CPU run
    # says that its device has waited: there the host is the device.
    steps, measured = steady_steps(evidence), step_breakdown(evidence)
    host = get_numbers(steps, "host_seconds")
    if measured is None or not host:
        return
    bound_fraction = fmean(each.get("host_bound") is True for each in steps)
    host_seconds, computing = median(host), measured.step - measured.data - measured.checkpoint
    if bound_fraction < MIN_BOUND_FRACTION or host_seconds < MIN_HOST_FRACTION * computing:
        return
    plan = evidence.plan
    switches = [f"{field}={str(value).lower()}" for patch in fewer_launches(plan) for field, value in patch.items()]
    settings = [*switches, *(["a larger plan.micro_batch with less plan.grad_accum"] if plan.grad_accum > 1 else [])]
    if any(launch_bound(evidence)) or (not settings and host_seconds <= MAX_HOST_SECONDS):
        return
    best = best_patch(evidence, measured, [*larger_micro_batches(plan), *fewer_launches(plan)])
    yield Finding(
        code="F016",
        severity="warning",
        verdict=f"the host limits the step: it takes {show_seconds(host_seconds)} to issue a step of "
        f"{show_seconds(measured.step)}, and the device waits for it",
        culprit="the host",
        evidence={
            "host_seconds": host_seconds,
            "step_seconds": measured.step_seconds,
            "bound_share": round(bound_fraction, 4),
            "micro_batch": plan.micro_batch,
            "grad_accum": plan.grad_accum,
        },
        fix="" if best else f"try {', or '.join(settings)}" if settings else BUSY_HOST_FIX,
        **remedy_fields(best),
        confidence=0.8,
    )


ALLOWED_SYNCS_PER_STEP = 1  # in forward and backward


def host_sync(evidence: Evidence) -> Iterator[Finding]:
    """Yield F009 if a profile shows that the host waits for the device inside forward or backward."""
    for trace in evidence.traces:
        steps = max(1, trace["steps"])
        waits, seconds = sum(trace["waits"].values()) / steps, trace["wait_seconds"] / steps
        if waits <= ALLOWED_SYNCS_PER_STEP:
            continue
        place = max(trace["places"], key=lambda each: trace["places"][each])
        yield Finding(
            code="F009",
            severity="warning",
            verdict=f"the host waits for the device {waits:.0f} times in the forward and backward of a step, "
            f"{seconds * 1e3:.1f} ms in total, and launches no kernels meanwhile",
            culprit=place,
            evidence={"waits_a_step": round(waits, 2), "by_call": trace["waits"], "places": trace["places"],
                      "trace": trace["file"]},
            fix="keep values on the device: no .item(), .tolist(), .cpu(), print or `if tensor:` in forward, a loss "
            "or a hook",
            confidence=0.85,
        )  # fmt: skip
        return


MIN_MEMORY_FRACTION = 0.25  # of compute time that waits for memory
# Of measured over predicted compute; else the model is wrong here.
MIN_PREDICTION_RATIO, MAX_PREDICTION_RATIO = 0.8, 1.3


def memory_bound(evidence: Evidence) -> Iterator[Finding]:
    """Yield F004 if much of compute waits for memory bandwidth, and another setting needs fewer bytes."""
    measured, question = step_breakdown(evidence), evidence.planner_inputs()
    if measured is None or question is None or not question.cluster.device.traits.has_data_sheet:
        return
    cluster = question.cluster
    infinite = replace(cluster, device=replace(cluster.device, reached={**cluster.device.reached, "memory": inf}))
    times = (predict(question.job, each, evidence.plan).time for each in (cluster, infinite))
    now, without_memory = (time["forward"] + time["backward"] + time["optimizer"] for time in times)
    fraction, ratio = 1 - without_memory / now, measured.compute / now
    if fraction < MIN_MEMORY_FRACTION or not MIN_PREDICTION_RATIO <= ratio <= MAX_PREDICTION_RATIO:
        return
    plan = evidence.plan
    patches = [*larger_micro_batches(plan)]
    patches += [] if plan.compile else [{"plan.compile": True}]
    patches += [{"plan.loss": "fused"}] if plan.loss == "logits" else []
    patches += [{"plan.precision": "bf16"}] if plan.precision == "fp32" else []
    best = best_patch(evidence, measured, patches)
    if best is None:
        return
    yield Finding(
        code="F004",
        severity="note",
        verdict=f"about {fraction:.0%} of compute on {cluster.device.name} waits for memory bandwidth",
        culprit="memory bandwidth",
        evidence={
            "compute_seconds": measured.compute,
            "predicted_seconds": now,
            "predicted_without_memory": without_memory,
            "memory_gb_per_second": cluster.device.stream_bandwidth / 1e9,
        },
        **remedy_fields(best),
        confidence=0.7,
    )


MIN_RECOMPILATIONS = 3  # after the warm-up: one or two may come from a last, smaller batch


def recompilations(evidence: Evidence) -> Iterator[Finding]:
    """Yield F008 if torch compiles repeatedly after the first steps."""
    first = evidence.steps[0]["step"] if evidence.steps else 0
    late = [
        each for each in evidence.events_of_kind("recompile") if each.get("rank") == 0 and each.get("step", 0) >= first
    ]
    if len(late) < MIN_RECOMPILATIONS:
        return
    facts = [each.get("data") or {} for each in late]
    what, count = Counter(str(each.get("what")) for each in facts).most_common(1)[0]
    why = next(str(each.get("why")) for each in facts if str(each.get("what")) == what)
    at = {each.get("step") for each in late}
    steps = warm_steps(evidence)
    usual = median(each["step_seconds"] for each in steps) if steps else 0.0
    total = sum(each["step_seconds"] for each in steps)
    lost = sum(max(0.0, each["step_seconds"] - usual) for each in steps if each["step"] in at)
    shapes = "size" in why and evidence.recipe.data.samples.batching != "pack"
    patch: Patch = {"data.samples.batching": "pack"} if shapes else {"plan.compile": False}
    gain = lost / total if total else None
    yield Finding(
        code="F008",
        severity="warning",
        verdict=f"{len(late)} recompilations after the first steps, {count} of them of {what}; they took about "
        f"{show_seconds(lost)}",
        culprit=what,
        evidence={"recompilations": len(late), "why": why, "lost_seconds": lost, "steps": sorted(map(str, at))[:8]},
        patch=patch,
        fix="" if shapes else "or remove what changes from step to step: torch's reason is in the evidence",
        expected_effect=f"steps {gain:.0%} shorter on average" if gain else "",
        gain=gain,
        confidence=0.9,
    )


MIN_ERROR_BARS = 1.5  # a run near the edge of the error bar is no finding
CPU_MIN_ERROR_BARS = 3.0  # uncalibrated predictions for CPUs are rough
CALIBRATE = (
    "calibrate this machine with `trimaran bench calibrate`; check clocks, links and memory with `trimaran doctor`"
)
CPU_MIN_STEP_SECONDS = 0.05  # below, operator overhead dominates, which the cost model does not predict


def prediction_off(evidence: Evidence) -> Iterator[Finding]:
    """Yield F015 if steps take longer, or memory is fuller, than the prediction's error bar allows."""
    measured, prediction = step_breakdown(evidence), evidence.plan.prediction
    if measured is None or prediction is None:
        return
    on_cpu = prediction.source.startswith("cpu ")
    yield from _slow_steps(evidence, measured, prediction, on_cpu=on_cpu)
    peak = max(get_numbers(evidence.steps, "peak_bytes"), default=0.0)
    over = peak / prediction.peak_bytes - 1 if prediction.peak_bytes else 0.0
    if not on_cpu and over > MIN_ERROR_BARS * prediction.error:
        yield Finding(
            code="F015",
            severity="note",
            verdict=f"a rank uses {show_bytes(peak)}, but {show_bytes(prediction.peak_bytes)} was predicted: "
            f"{over:+.0%} with an error bar of {prediction.error:.0%}",
            culprit="memory",
            evidence={"peak_bytes": peak, "predicted": prediction.peak_bytes, "error": prediction.error},
            fix="find what holds it with --set telemetry.memory_snapshots=true",
            confidence=0.9,
        )


def _slow_steps(
    evidence: Evidence, measured: StepBreakdown, prediction: Prediction, *, on_cpu: bool
) -> Iterator[Finding]:
    """Yield a finding about step time. Waits for data and checkpoints are left out, as in the prediction."""
    # CPU cores are shared with other programs, so on a CPU the node's samples must be there.
    took, time = measured.step - measured.data - measured.checkpoint, prediction.time
    # Cores that other processes use, by node.
    found: dict[object, list[float]] = {}
    for sample in evidence.samples:
        cpu, cores, ranks = get_number(sample, "cpu"), get_number(sample, "cores"), sample.get("ranks")
        if cpu is None or cores is None or not isinstance(ranks, dict) or cpu < 0.9:
            continue
        used = [get_number(each, "cpu") for each in ranks.values()]
        if not used or None in used:  # ranks are starting or ending
            continue
        ours = sum(each or 0.0 for each in used)
        ours += sum(get_number(each, "loader_cpu") or 0.0 for each in ranks.values())
        found.setdefault(sample.get("node"), []).append(cpu * cores - ours)
    most = max((median(each) for each in found.values()), default=0.0)
    off, others = took / prediction.step_seconds - 1, (most if most > 0.5 else 0.0)
    if abs(off) <= (CPU_MIN_ERROR_BARS if on_cpu and not others else MIN_ERROR_BARS) * prediction.error:
        return
    if on_cpu and (off < 0 or prediction.step_seconds < CPU_MIN_STEP_SECONDS or not evidence.samples):
        return
    waits = time.get("comm", 0.0) + time.get("bubble", 0.0)
    excess_wait = measured.comm + measured.straggler + measured.bubble - waits
    excess_compute = measured.compute - (prediction.step_seconds - waits)
    part = "communication" if excess_wait > excess_compute else "compute"
    yield Finding(
        code="F015",
        severity="warning" if off > 0 else "note",
        verdict=f"a step takes {show_seconds(took)}, but {show_seconds(prediction.step_seconds)} was predicted: "
        f"{off:+.0%} with an error bar of {prediction.error:.0%}",
        culprit="other processes" if others else part,
        evidence={
            "step_seconds": took,
            "predicted": prediction.step_seconds,
            "error": prediction.error,
            "measured": measured.fractions,
            "predicted_time": dict(time),
            **({"cores_of_others": round(others, 2)} if others else {}),
        },
        fix="stop the other programs on these nodes" if others else CALIBRATE,
        confidence=0.8,
    )


def debug_on(evidence: Evidence) -> Iterator[Finding]:
    """Yield F078 if the recipe switches debugging on, so that nobody compares its speed."""
    if evidence.recipe.faults.debug and evidence.steps:
        yield Finding(
            code="F078",
            severity="note",
            verdict="debugging is on: all ranks compare every collective, and the host waits for every kernel",
            culprit="faults.debug",
            evidence={},
            patch={"faults.debug": False},
            expected_effect="steps take their usual time",
            confidence=1.0,
        )
