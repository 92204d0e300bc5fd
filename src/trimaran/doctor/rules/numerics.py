"""Rules about the loss and the numbers of a run: divergence, spikes, NaN, updates that are too large or too small."""

from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import group_medians, plural, rank_names, steps_with_groups, valid_patch
from trimaran.doctor.predicted_gain import Patch
from trimaran.doctor.step_breakdown import get_number, get_numbers

NARROW_RANGE_PRECISIONS = ("fp16", "fp8")


def not_finite(evidence: Evidence) -> Iterator[Finding]:
    """Yield F050 if updates were skipped because the loss or the gradient norm was NaN or Inf."""
    skips = [
        each
        for each in evidence.events_of_kind("skip")
        if each["data"].get("loss") is None or each["data"].get("grad_norm") is None
    ]
    if not skips:
        return
    data = skips[-1]["data"]
    ranks = rank_names(data.get("ranks") or ())
    searched = next((each["data"] for each in reversed(skips) if each["data"].get("born")), {})
    origin, reproduced = searched.get("born", {}), searched.get("reproduced") or {}
    is_device = reproduced.get("again") is False
    repetition = f"; {reproduced['verdict']}" if reproduced.get("verdict") else ""
    # A precision with a wider range, or a rewind that skips the samples if they are the cause.
    what, faults = origin.get("what"), evidence.recipe.faults
    always = len(skips) > faults.max_skips // 2 and what != "input"
    patch: Patch = {}
    if not is_device and evidence.plan.precision in NARROW_RANGE_PRECISIONS and what in ("output", "gradient", None):
        patch = {"plan.precision": "bf16"}
    elif not (is_device or what in ("weight", "not again") or faults.not_finite == "rewind" or always):
        patch = {"faults.not_finite": "rewind"}
    patch = valid_patch(evidence.recipe, patch)
    fix, effect = "", ""
    if "plan.precision" in patch:
        effect = "bf16 has the range of fp32 and does not overflow here"
    elif patch:
        effect = "the run rewinds to the last good state and skips these samples"
    elif is_device or what == "not again":
        fix = f"suspect the hardware of {ranks or 'the ranks'}, not the data: run `trimaran doctor` there"
    elif what == "weight":
        fix = "move the later checkpoints away (`trimaran checkpoints list RUN` shows them), and resume"
    else:
        fix = f"check divisions, square roots and logarithms in {origin.get('module') or 'the model'}"
    yield Finding(
        code="F050",
        severity="fault",
        verdict=f"{plural(len(skips), 'update')} {'was' if len(skips) == 1 else 'were'} skipped because "
        f"{data.get('reason', 'of NaN or Inf')}, the last time at step {skips[-1].get('step')}: {_describe(origin)}"
        f"{repetition}",
        culprit=f"{origin['module']} on rank {origin.get('rank')}" if origin.get("module") else ranks,
        evidence={
            "steps": [each.get("step") for each in skips[-8:]],
            "reason": data.get("reason"),
            "ranks": data.get("ranks"),
            "sample_ids": list(data.get("sample_ids") or ())[:8],
            "born": origin,
            "reproduced": reproduced,
        },
        patch=patch,
        fix=fix,
        expected_effect=effect,
        confidence=0.9 if origin.get("module") else 0.6,
        step=int(skips[-1].get("step") or 0),
    )


def _describe(origin: Line) -> str:
    what, module, rank = origin.get("what"), origin.get("module"), origin.get("rank")
    on = f" on rank {rank}" if rank is not None else ""
    match what:
        case "weight":
            return f"the weight {module} itself is NaN or Inf{on}"
        case "input":
            return f"the loader's input {module} was NaN or Inf{on}"
        case "output":
            return f"the first NaN or Inf is in the output of {module}{on}"
        case "gradient" if not module:
            return "all outputs are finite, so backward produced it"
        case "gradient":
            return f"all outputs are finite, and the first NaN or Inf is in the gradient of {module}{on}"
        case "not again":
            return "a second computation of the same samples was finite"
    return "its origin was not searched"


MIN_NORMS = 20
NORM_WINDOW_STEPS = 10  # whose median is compared
MIN_GROWTH_FACTOR = 10.0
MIN_NORM_OVER_CLIP = 10.0  # a norm below this, times clip_norm, is harmless


def gradient_explosion(evidence: Evidence) -> Iterator[Finding]:
    """Yield F052 if the gradient norm ends far above where it was, and far above the clipping norm."""
    norms = get_numbers(evidence.steps, "grad_norm")
    if len(norms) < MIN_NORMS:
        return
    train, now = evidence.recipe.train, median(norms[-NORM_WINDOW_STEPS:])
    starts = range(0, len(norms) - NORM_WINDOW_STEPS + 1, NORM_WINDOW_STEPS)
    usual = min(median(norms[start : start + NORM_WINDOW_STEPS]) for start in starts)
    if now < MIN_GROWTH_FACTOR * usual or now < MIN_NORM_OVER_CLIP * max(1.0, train.clip_norm):
        return
    groups = group_medians(evidence, "grad_norm", last=3)
    most = max(groups, key=lambda name: groups[name], default="")
    patch = {"train.clip_norm": 1.0} if not train.clip_norm else {"train.lr": float(f"{train.lr / 10:.2g}")}
    yield Finding(
        code="F052",
        severity="warning",
        verdict=f"the gradient norm grew from {usual:.3g} to {now:.3g}"
        + (f", and is largest in {most} ({groups[most]:.3g})" if most else ""),
        culprit=most or "the gradients",
        evidence={"before": usual, "now": now, "clip_norm": train.clip_norm, "lr": train.lr, "groups": groups},
        patch=valid_patch(evidence.recipe, patch),
        expected_effect="updates stay in proportion to the weights",
        confidence=0.8,
    )


MIN_STEPS_WITH_GROUPS = 3  # with group metrics
VANISHING_FRACTION = 1e-5  # of the largest gradient norm of any group


def gradient_vanishing(evidence: Evidence) -> Iterator[Finding]:
    """Yield F053 if the gradient norm of some groups is tiny compared with the largest one."""
    norms = group_medians(evidence, "grad_norm")
    if len(steps_with_groups(evidence)) < MIN_STEPS_WITH_GROUPS or not norms or not (most := max(norms.values())):
        return
    vanishing = {name: norm for name, norm in norms.items() if norm < VANISHING_FRACTION * most}
    if not vanishing:
        return
    weakest = min(vanishing, key=lambda name: vanishing[name])
    strongest = max(norms, key=lambda name: norms[name])
    patch = valid_patch(evidence.recipe, {"plan.precision": "bf16"}) if evidence.plan.precision == "fp16" else {}
    yield Finding(
        code="F053",
        severity="warning",
        verdict=f"{', '.join(list(vanishing)[:4])} {'gets' if len(vanishing) == 1 else 'get'} almost no gradient: "
        f"norm {vanishing[weakest]:.2g} in {weakest}, {most:.2g} in {strongest}",
        culprit=weakest,
        evidence={"grad_norm": norms},
        patch=patch,
        fix=""
        if patch
        else f"check what lies between {weakest} and the loss: a closed gate, a scale near 0, a missing residual",
        expected_effect="small gradients no longer underflow to 0" if patch else "",
        confidence=0.7,
    )


MIN_LOSS_SCALE = 16.0  # below this, small gradients underflow to 0
MAX_SKIPPED_IN_A_ROW = 4  # fewer skipped steps are the normal search for a scale


def loss_scale_collapse(evidence: Evidence) -> Iterator[Finding]:
    """Yield F054 if the loss scale has fallen close to 1, or the run ended because it could not fall further."""
    scales = get_numbers(evidence.steps, "loss_scale")
    ended = any(each["data"].get("code") == "P030" for each in evidence.events_of_kind("error"))
    recently_skipped = [bool(each.get("skipped")) for each in evidence.steps][-MAX_SKIPPED_IN_A_ROW:]
    low = bool(scales) and scales[-1] < MIN_LOSS_SCALE
    if not ended and not (low and all(recently_skipped)) and not (scales and scales[-1] < 1.0):
        return
    skipped = sum(bool(each.get("skipped")) for each in evidence.steps)
    now = scales[-1] if scales else 0.0
    yield Finding(
        code="F054",
        severity="fault" if ended else "warning",
        verdict=f"the loss scale fell from {max(scales, default=0.0):g} to {now:g} and {skipped} of "
        f"{len(evidence.steps)} updates were skipped: the fp16 gradients are not finite",
        culprit=f"plan.precision {evidence.plan.precision}",
        evidence={"scale": now, "highest": max(scales, default=None), "skipped": skipped, "ended": ended},
        patch=valid_patch(evidence.recipe, {"plan.precision": "bf16"}),
        expected_effect="bf16 has the range of fp32 and needs no loss scale",
        confidence=0.95,
    )


MAX_NAMES_SHOWN = 8


def unused_parameters(evidence: Evidence) -> Iterator[Finding]:
    """Yield F055 if parameters had no gradient at the first step of the latest attempt."""
    started = evidence.events_of_kind("started")
    newest = max((each.get("attempt", 0) for each in started), default=0)
    by_rank = {each["rank"]: each["data"]["unused"] for each in started
               if each.get("attempt", 0) == newest and each["data"].get("unused")}  # fmt: skip
    names = sorted({name for unused in by_rank.values() for name in unused})
    if not names:
        return
    model, tower = evidence.recipe.model, names[0].partition(".")[0]
    is_tower = model.kind.reads == "images" and all(name.partition(".")[0] == tower for name in names)
    patch = valid_patch(evidence.recipe, {"model.freeze": [*model.freeze, tower]}) if is_tower else {}
    yield Finding(
        code="F055",
        severity="warning",
        verdict=f"{plural(len(names), 'parameter')} got no gradient: {', '.join(names[:3])}"
        f"{' and more' if len(names) > 3 else ''}; they take memory for gradients and optimizer states and never learn",
        culprit=names[0].rpartition(".")[0] or names[0],
        evidence={"parameters": names[:MAX_NAMES_SHOWN], "count": len(names), "ranks": rank_names(sorted(by_rank))},
        patch=patch,
        fix="" if patch else "use them in forward, remove them from the model, or set requires_grad to False",
        expected_effect="the same loss curve, with less memory",
        confidence=0.95,
        step=1,
    )


def replicas_differ(evidence: Evidence) -> Iterator[Finding]:
    """Yield F073 if a rank's weights differ from its replicas, or changed in memory: its device may be faulty."""
    events = evidence.events_of_kind("differ")
    if not events:
        return
    data = events[-1]["data"]
    ranks = data.get("ranks") or ()
    what = "memory changed between updates" if data.get("type") == "MemoryChanged" else "replicas differed"
    stops = evidence.recipe.faults.not_finite == "stop"
    patch = valid_patch(evidence.recipe, {"faults.not_finite": "rewind"}) if stops else {}
    yield Finding(
        code="F073",
        severity="fault",
        verdict=f"{what} {plural(len(events), 'time')}, the last time at step {events[-1].get('step')}: "
        f"{data.get('message')}",
        culprit=rank_names(ranks) or "one of the replicas",
        evidence={"ranks": list(ranks), "keys": list(data.get("keys") or ())[:4], "since": data.get("since")},
        patch=patch,
        fix=f"suspect the device of {rank_names(ranks) or 'each rank'}: leave that node out and test it",
        expected_effect="the run rewinds to the last state that is known to be good" if patch else "",
        confidence=0.9,
        step=int(events[-1].get("step") or 0),
    )


SPIKE_WINDOW_STEPS = 20  # before a spike, whose median it is compared with
# A spike exceeds the median by all of these: an absolute amount, a fraction of it, and a multiple of the deviation.
MIN_SPIKE, MIN_SPIKE_FRACTION, MIN_DEVIATIONS = 0.5, 0.5, 10.0
SPIKE_REASON = "the loss j"  # how the guard's reason starts if it skipped a step because of a spike


def loss_spike(evidence: Evidence) -> Iterator[Finding]:
    """Yield F051 if the loss of a step is far above those before it, whether its update was skipped or not."""
    skipped = [
        each for each in evidence.events_of_kind("skip") if str(each["data"].get("reason", "")).startswith(SPIKE_REASON)
    ]
    applied: list[Line] = []
    losses: list[float] = []
    for step in evidence.steps:
        loss = get_number(step, "loss")
        if loss is None or step.get("skipped"):
            continue
        recent = losses[-SPIKE_WINDOW_STEPS:]
        if len(recent) == SPIKE_WINDOW_STEPS:
            usual = median(recent)
            deviation = median(abs(each - usual) for each in recent)
            if loss - usual > max(MIN_SPIKE, MIN_SPIKE_FRACTION * abs(usual), MIN_DEVIATIONS * deviation):
                applied.append({"step": step["step"], "loss": loss, "before": usual})
        losses.append(loss)
    refused: list[Line] = [
        {"step": int(each.get("step") or 0), "loss": get_number(each, "data", "loss") or 0.0, "before": 0.0}
        for each in skipped
    ]
    last = max([*refused, *applied], key=lambda each: each["step"], default=None)
    if last is None:
        return
    ranks, train = skipped[-1]["data"].get("ranks") or () if skipped else (), evidence.recipe.train
    patch: Patch = {"train.clip_norm": 1.0} if not train.clip_norm else {"train.lr": float(f"{train.lr / 2:.2g}")}
    if ranks and evidence.recipe.faults.not_finite == "skip":  # the samples of these ranks were bad
        patch = {"faults.not_finite": "rewind"}
    patch = valid_patch(evidence.recipe, patch)
    rise = f", from {last['before']:.4g} to {last['loss']:.4g}" if last["before"] else f" to {last['loss']:.4g}"
    yield Finding(
        code="F051",
        severity="warning",
        verdict=f"the loss spiked at {plural(len(skipped) + len(applied), 'step')}, the last time at step "
        f"{last['step']}{rise}; {plural(len(skipped), 'update')} skipped",
        culprit=rank_names(ranks) or f"step {last['step']}",
        evidence={
            "refused": [each.get("step") for each in skipped[-8:]],
            "applied": [each["step"] for each in applied[-8:]],
            "sample_ids": list(skipped[-1]["data"].get("sample_ids") or ())[:8] if skipped else [],
            "lr": train.lr,
        },
        patch=patch,
        fix="" if patch else "check the samples of that step, and what changed before it",
        expected_effect="the run rewinds to the last good state and skips these samples"
        if "faults.not_finite" in patch
        else "one bad gradient changes the weights less",
        confidence=0.8,
        step=last["step"],
    )


MIN_LOSSES_HIGH = 20
LAST_STEPS = 10  # whose median is the last loss
MIN_RISE_FRACTION = 0.02  # of the first loss
# Ratios of update to weight norm, of the median group. Tiny decoders learn best at 0.04.
LARGE_UPDATE_RATIO = 0.03  # too large if the loss does not fall
HUGE_UPDATE_RATIO = 0.1  # always too large: within some steps the weights are overwritten
LOWERED_UPDATE_RATIO = 0.02  # that the patch aims for


def learning_rate_high(evidence: Evidence) -> Iterator[Finding]:
    """Yield F056 if updates are huge compared with the weights, or large while the loss is above its start."""
    # Updates are largest in the first steps, before the weights have grown, so those steps must be in the evidence.
    losses = get_numbers(evidence.steps, "loss")
    if len(losses) < MIN_LOSSES_HIGH or evidence.steps[0]["step"] > LAST_STEPS:
        return
    first, last, highest = losses[0], median(losses[-LAST_STEPS:]), max(losses)
    ratio, at, most = 0.0, 0, ""  # the largest update of the median group, its step, and the group of the largest there
    for step in steps_with_groups(evidence):
        ratios = {name: each for name in step["groups"]
                  if (each := get_number(step, "groups", name, "update_ratio")) is not None}  # fmt: skip
        if ratios and (middle := median(ratios.values())) > ratio:
            ratio, at, most = middle, int(step["step"]), max(ratios, key=lambda name: ratios[name])
    early_jump = max(losses[:MIN_LOSSES_HIGH]) > first + max(1.0, 0.25 * first)
    risen = last > first * (1 + MIN_RISE_FRACTION) or early_jump
    if not (ratio > HUGE_UPDATE_RATIO or (risen and (ratio > LARGE_UPDATE_RATIO or not ratio))):
        return
    lr = evidence.recipe.train.lr
    factor = min(0.5, max(0.01, LOWERED_UPDATE_RATIO / ratio)) if ratio else 0.1
    yield Finding(
        code="F056",
        severity="warning",
        verdict=(f"the update at step {at} was {ratio:.2g} of the weight norm, and " if ratio else "")
        + (f"the loss rose from {first:.4g} to {highest:.4g} and" if risen else "the loss")
        + f" is at {last:.4g}: a learning rate of {lr:g} is too high",
        culprit=f"train.lr {lr:g}" + (f", most in {most}" if most else ""),
        evidence={"first_loss": first, "last_loss": last, "highest_loss": highest, "update_ratio": ratio, "lr": lr},
        patch=valid_patch(evidence.recipe, {"train.lr": float(f"{lr * factor:.1g}")}),
        expected_effect=f"updates of at most {ratio * factor:.2g} of the weight norm" if ratio else "the loss falls",
        confidence=0.9 if ratio else 0.6,
    )


MIN_LOSSES_LOW = 30
TINY_UPDATE_RATIO = 1e-5  # of update to weight norm
MIN_FALL_FRACTION = 0.01
RAISED_UPDATE_RATIO = 1e-3  # that the patch aims for
MAX_LR_FACTOR = 10_000.0


def learning_rate_low(evidence: Evidence) -> Iterator[Finding]:
    """Yield F057 if updates are tiny compared with the weights and the loss does not fall."""
    losses = get_numbers(evidence.steps, "loss")
    ratios = group_medians(evidence, "update_ratio", near_peak=True)
    if len(losses) < MIN_LOSSES_LOW or not ratios or not 0 < (ratio := median(ratios.values())) < TINY_UPDATE_RATIO:
        return
    first, last = median(losses[:10]), median(losses[-10:])
    if last < first * (1 - MIN_FALL_FRACTION):
        return
    lr = evidence.recipe.train.lr
    wanted = min(10.0, float(f"{lr * min(MAX_LR_FACTOR, RAISED_UPDATE_RATIO / ratio):.1g}"))
    yield Finding(
        code="F057",
        severity="warning",
        verdict=f"updates are {ratio:.2g} of the weight norm, and the loss went from {first:.4g} to {last:.4g} "
        f"in {len(losses)} steps: a learning rate of {lr:g} is too low",
        culprit=f"train.lr {lr:g}",
        evidence={"update_ratio": ratios, "first_loss": first, "last_loss": last, "lr": lr},
        patch=valid_patch(evidence.recipe, {"train.lr": wanted}),
        expected_effect=f"updates of about {ratio * wanted / lr:.1g} of the weight norm",
        confidence=0.8,
    )


EARLY_STEPS = 20  # in which the loss may rise
MIN_WARMUP_STEPS = 5  # fewer are as good as none
MIN_EARLY_RISE_FRACTION = 0.05  # of the first loss
MIN_PATCHED_WARMUP_STEPS = 10


def warm_up(evidence: Evidence) -> Iterator[Finding]:
    """Yield F058 if there is no warm-up and the loss rises before it falls."""
    train = evidence.recipe.train
    early = [each for each in evidence.steps if each["step"] <= EARLY_STEPS]
    losses = get_numbers(early, "loss")
    if train.schedule.warmup_steps >= MIN_WARMUP_STEPS or len(losses) < EARLY_STEPS // 2 or early[0]["step"] != 1:
        return
    peak = max(losses[1:])
    if peak < losses[0] * (1 + MIN_EARLY_RISE_FRACTION):
        return
    steps = max(MIN_PATCHED_WARMUP_STEPS, round(0.02 * train.steps))
    yield Finding(
        code="F058",
        severity="warning",
        verdict=f"the loss rose from {losses[0]:.4g} to {peak:.4g} in the first {len(losses)} steps, and the learning "
        f"rate is {train.lr:g} from step {max(1, train.schedule.warmup_steps)} on",
        culprit=f"train.schedule.warmup_steps {train.schedule.warmup_steps}",
        evidence={"first_loss": losses[0], "highest_loss": peak, "lr": train.lr},
        patch=valid_patch(evidence.recipe, {"train.schedule.warmup_steps": steps}),
        expected_effect="Adam estimates the size of the gradients before it takes large steps",
        confidence=0.8,
    )


COMPRESSED_WINDOW_STEPS = 20  # whose median is the loss of a part of the run
MIN_WINDOWS = 3
MIN_COMPRESSED_RISE_FRACTION = 0.02  # above the lowest window of the run
RECENT_ERRORS = 5
# Relative errors of the sum that are too large. With error feedback what is not sent follows later: an error of 1 to 2
# is normal, and more means that what is sent is old.
MAX_ERROR, MAX_ERROR_WITH_FEEDBACK = 0.5, 3.0


def compression_harm(evidence: Evidence) -> Iterator[Finding]:
    """Yield F075 if the error of the compressed sum is large and the loss rises above the run's own trend."""
    settings = evidence.plan.comm.compression_settings
    errors = get_numbers(evidence.steps, "compression_error")
    losses = get_numbers((each for each in evidence.steps if not each.get("skipped")), "loss")
    if not errors or len(losses) < MIN_WINDOWS * COMPRESSED_WINDOW_STEPS:
        return
    edges = range(len(losses) % COMPRESSED_WINDOW_STEPS, len(losses) + 1, COMPRESSED_WINDOW_STEPS)
    windows = [median(losses[first:last]) for first, last in pairwise(edges)]
    error, lowest, last = median(errors[-RECENT_ERRORS:]), min(windows), windows[-1]
    limit = MAX_ERROR_WITH_FEEDBACK if settings.keeps_residual else MAX_ERROR
    if error <= limit or last <= lowest + MIN_COMPRESSED_RISE_FRACTION * abs(lowest):
        return
    yield Finding(
        code="F075",
        severity="warning",
        verdict=f"the sum of gradients compressed by {settings.kind} is {error:.2g} of its size off, and the loss rose "
        f"from {lowest:.4g} to {last:.4g}",
        culprit=f"plan.comm.compression {settings.kind}",
        evidence={"error": error, "limit": limit, "lowest_loss": lowest, "last_loss": last, "errors": errors[-8:]},
        patch=valid_patch(evidence.recipe, {"plan.comm.compression": "bf16"}),
        expected_effect="gradients are rounded to 16 bits only; more bytes are sent",
        confidence=0.6,
    )
