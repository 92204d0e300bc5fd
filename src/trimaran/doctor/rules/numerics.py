"""Rules about numerics: NaN and Inf, gradients, the loss scale, and replicas that differ."""

from collections.abc import Iterator
from statistics import median

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import group_medians, plural, rank_names, steps_with_groups, valid_patch
from trimaran.doctor.predicted_gain import Patch
from trimaran.doctor.step_breakdown import get_numbers

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
    patch = {} if is_device else valid_patch(evidence.recipe, _not_finite_patch(evidence, origin, len(skips)))
    fix, effect = "", ""
    if "plan.precision" in patch:
        effect = "bf16 has the range of fp32 and does not overflow here"
    elif patch:
        effect = "the run rewinds to the last good state and skips these samples"
    elif is_device or origin.get("what") == "not again":
        fix = f"suspect the hardware of {ranks or 'the ranks'}, not the data: run `trimaran doctor` there"
    elif origin.get("what") == "weight":
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


def _not_finite_patch(evidence: Evidence, origin: Line, num_skips: int) -> Patch:
    """Return the patch: a precision with a wider range, or a rewind that skips the samples if they are the cause."""
    if evidence.plan.precision in NARROW_RANGE_PRECISIONS and origin.get("what") in ("output", "gradient", None):
        return {"plan.precision": "bf16"}
    if origin.get("what") in ("weight", "not again") or evidence.recipe.faults.not_finite == "rewind":
        return {}
    always = num_skips > evidence.recipe.faults.max_skips // 2 and origin.get("what") != "input"
    return {} if always else {"faults.not_finite": "rewind"}


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
