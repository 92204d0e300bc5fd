"""F050: NaN or Inf in the loss or gradients, and the module that first produced it."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import plural, rank_names, valid_patch
from trimaran.doctor.predicted_gain import Patch

NARROW_RANGE_PRECISIONS = ("fp16", "fp8")


def not_finite(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if updates were skipped because the loss or the gradient norm was NaN or Inf."""
    skips = [each for each in evidence.events_of_kind("skip") if _is_not_finite(each["data"])]
    if not skips:
        return
    data = skips[-1]["data"]
    searched = next((each["data"] for each in reversed(skips) if each["data"].get("born")), {})
    origin, reproduced = searched.get("born", {}), searched.get("reproduced") or {}
    is_device = reproduced.get("again") is False
    patch = {} if is_device else valid_patch(evidence.recipe, _patch(evidence, origin, num_skips=len(skips)))
    yield Finding(
        code="F050",
        severity="fault",
        verdict=f"{plural(len(skips), 'update')} {'was' if len(skips) == 1 else 'were'} skipped because "
        f"{data.get('reason', 'of NaN or Inf')}, the last time at step {skips[-1].get('step')}: {_describe(origin)}"
        f"{_repetition(reproduced)}",
        culprit=_culprit(origin, data),
        evidence={
            "steps": [each.get("step") for each in skips[-8:]],
            "reason": data.get("reason"),
            "ranks": data.get("ranks"),
            "sample_ids": list(data.get("sample_ids") or ())[:8],
            "born": origin,
            "reproduced": reproduced,
        },
        patch=patch,
        fix="" if patch else _fix({"what": "not again"} if is_device else origin, data),
        expected_effect=_effect(patch),
        confidence=0.9 if origin.get("module") else 0.6,
        step=int(skips[-1].get("step") or 0),
    )


def _is_not_finite(data: Line) -> bool:
    return data.get("loss") is None or data.get("grad_norm") is None


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


def _repetition(reproduced: Line) -> str:
    verdict = reproduced.get("verdict")
    return f"; {verdict}" if verdict else ""


def _culprit(origin: Line, data: Line) -> str:
    if origin.get("module"):
        return f"{origin['module']} on rank {origin.get('rank')}"
    return rank_names(data.get("ranks") or ())


def _patch(evidence: Evidence, origin: Line, *, num_skips: int) -> Patch:
    """Return the patch: a precision with a wider range, or a rewind that skips the samples if they are the cause."""
    if evidence.plan.precision in NARROW_RANGE_PRECISIONS and origin.get("what") in ("output", "gradient", None):
        return {"plan.precision": "bf16"}
    if origin.get("what") in ("weight", "not again") or evidence.recipe.faults.not_finite == "rewind":
        return {}
    always = num_skips > evidence.recipe.faults.max_skips // 2 and origin.get("what") != "input"
    return {} if always else {"faults.not_finite": "rewind"}


def _fix(origin: Line, data: Line) -> str:
    match origin.get("what"):
        case "weight":
            return "move the later checkpoints away (`trimaran checkpoints list RUN` shows them), and resume"
        case "not again":
            ranks = rank_names(data.get("ranks") or ()) or "the ranks"
            return f"suspect the hardware of {ranks}, not the data: run `trimaran doctor` there"
    return f"check divisions, square roots and logarithms in {origin.get('module') or 'the model'}"


def _effect(patch: Patch) -> str:
    if "plan.precision" in patch:
        return "bf16 has the range of fp32 and does not overflow here"
    return "the run rewinds to the last good state and skips these samples" if patch else ""
