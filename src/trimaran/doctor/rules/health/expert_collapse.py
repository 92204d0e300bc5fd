"""F076: the router of a mixture of experts has collapsed to few experts."""

from collections.abc import Iterator
from statistics import median

from trimaran.core import Finding, Recipe, UserError
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import valid_patch
from trimaran.doctor.predicted_gain import Patch
from trimaran.models import ExpertSpec, decoder_of, spec_of

WINDOW_STEPS = 50  # the last ones, whose medians count
FIRST_STEPS = 50  # not judged: a router that starts from random weights needs some steps to spread its tokens
MAX_IDLE_FRACTION = 0.2
MIN_ENTROPY = 0.6  # of the loads of a layer's experts, 1 if all are equal
USUAL_BALANCE, USUAL_RATE = 0.01, 0.001
MAX_BALANCE = 1.0


def expert_collapse(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if for many steps many experts got no token, or few experts got nearly all."""
    routers = [each["router"] for each in evidence.steps if each["step"] > FIRST_STEPS and _is_router(each)]
    if len(routers) < WINDOW_STEPS:
        return
    idle, entropy = (median(float(each[name]) for each in routers[-WINDOW_STEPS:]) for name in ("idle", "entropy"))
    if idle <= MAX_IDLE_FRACTION and entropy >= MIN_ENTROPY:
        return
    yield Finding(
        code="F076",
        severity="warning",
        verdict=f"in the last {WINDOW_STEPS} steps {idle:.0%} of the experts got no token, and the entropy of their "
        f"loads is {entropy:.2f} of the largest possible: the routers use few experts",
        culprit="the routers",
        evidence={"idle": idle, "entropy": entropy, "imbalance": routers[-1].get("imbalance")},
        patch=_patch(evidence.recipe),
        expected_effect="tokens are spread over more experts within some hundred steps",
        confidence=0.8,
    )


def _is_router(step: dict) -> bool:
    router = step.get("router")
    return isinstance(router, dict) and {"idle", "entropy"} <= router.keys()


def _patch(recipe: Recipe) -> Patch:
    """Return a stronger balance: a faster correction bias where there is one, else ten times the balance loss."""
    experts = _experts(recipe)
    if experts is None:
        return {}
    if experts.router.correction:
        rate = max(USUAL_RATE, 2 * experts.router.correction_rate)
        return valid_patch(recipe, {"model.shape.experts.router.correction_rate": rate})
    balance = min(MAX_BALANCE, max(USUAL_BALANCE, 10 * experts.balance))
    return valid_patch(recipe, {"model.shape.experts.balance": balance})


def _experts(recipe: Recipe) -> ExpertSpec | None:
    try:
        decoder = decoder_of(spec_of(recipe.model))
    except UserError:
        return None
    return None if decoder is None else decoder.block.experts
