"""F050: numbers that are none, and where they were born."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import rank_names, sound, times
from trimaran.doctor.predicted_gain import Patch

NARROW = ("fp16", "fp8")  # precisions whose numbers end early


def not_finite(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when steps were refused since their loss or gradient was not finite."""
    skips = [each for each in evidence.of_kind("skip") if _is_not_finite(each["data"])]
    if not skips:
        return
    data = skips[-1]["data"]
    born = next((each["data"]["born"] for each in reversed(skips) if each["data"].get("born")), {})
    patch = sound(evidence.recipe, _patch(evidence, born, num_skips=len(skips)))
    yield Finding(
        code="F050",
        severity="fault",
        verdict=f"{times(len(skips), 'step')} {'was' if len(skips) == 1 else 'were'} refused because "
        f"{data.get('reason', 'numbers were not finite')}, the last at step {skips[-1].get('step')}: {_told(born)}",
        culprit=_culprit(born, data),
        evidence={
            "steps": [each.get("step") for each in skips[-8:]],
            "reason": data.get("reason"),
            "ranks": data.get("ranks"),
            "sample_ids": list(data.get("sample_ids") or ())[:8],
            "born": born,
        },
        patch=patch,
        fix="" if patch else _fix(born, data),
        expected_effect=_effect(patch),
        confidence=0.9 if born.get("module") else 0.6,
        step=int(skips[-1].get("step") or 0),
    )


def _is_not_finite(data: Line) -> bool:
    return data.get("loss") is None or data.get("grad_norm") is None


def _told(born: Line) -> str:
    what, module, rank = born.get("what"), born.get("module"), born.get("rank")
    on = f" on rank {rank}" if rank is not None else ""
    match what:
        case "weight":
            return f"the weight {module} itself is not finite{on}"
        case "input":
            return f"what the loader gave as {module} was not finite{on}"
        case "output":
            return f"the first output that is not finite is that of {module}{on}"
        case "gradient" if not module:
            return "the outputs are finite, so it was born in a gradient"
        case "gradient":
            return f"the outputs are finite, and the first gradient that is not is that of {module}{on}"
        case "not again":
            return "the same samples gave finite numbers when they were computed once more"
    return "nobody has looked where"


def _culprit(born: Line, data: Line) -> str:
    if born.get("module"):
        return f"{born['module']} on rank {born.get('rank')}"
    return rank_names(data.get("ranks") or ())


def _patch(evidence: Evidence, born: Line, *, num_skips: int) -> Patch:
    """Return what takes the reason away: wider numbers, or another batch where the samples did it."""
    if evidence.plan.precision in NARROW and born.get("what") in ("output", "gradient", None):
        return {"plan.precision": "bf16"}
    if born.get("what") in ("weight", "not again") or evidence.recipe.faults.not_finite == "rewind":
        return {}
    always = num_skips > evidence.recipe.faults.max_skips // 2 and born.get("what") != "input"
    return {} if always else {"faults.not_finite": "rewind"}


def _fix(born: Line, data: Line) -> str:
    match born.get("what"):
        case "weight":
            return "move the checkpoints away that came after it, see `trimaran checkpoints list RUN`, and resume"
        case "not again":
            who = rank_names(data.get("ranks") or ()) or "the ranks"
            return f"suspect the machine of {who} and not the data: run `trimaran doctor` there"
    return f"look at what {born.get('module') or 'the network'} divides by, takes the root or the logarithm of"


def _effect(patch: Patch) -> str:
    if "plan.precision" in patch:
        return "bf16 has the range of fp32: what overflowed does not"
    return "the run goes back to the last good state and leaves these samples out" if patch else ""
