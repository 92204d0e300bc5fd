"""Checks a plan by what our trainer can do with a Hugging Face model, as its code says."""

from trimaran.core import Plan, Recipe, UserError
from trimaran.core.optional_packages import no_fp8_layers
from trimaran.models.hf_facts import HfFacts, refuse_seq_len, refuse_tp_degree


def check_hf_facts(plan: Plan, recipe: Recipe, facts: HfFacts | None) -> None:
    """Raise the mistake that a worker would raise for this plan. Without facts, only the worker knows."""
    if facts is None:
        return
    if facts.untrainable is not None:
        raise facts.untrainable
    if facts.max_seq_len:
        refuse_seq_len(recipe.data.seq_len, facts.max_seq_len)
    if plan.precision == "fp8" and not facts.has_fp8_layers:
        raise no_fp8_layers()
    check_hf_axes(plan.mesh.tp, plan.mesh.cp, facts)


def check_hf_axes(tp: int, cp: int, facts: HfFacts) -> None:
    """Raise if the model cannot be split by these degrees."""
    if tp > 1 and facts.without_tp is not None:
        raise facts.without_tp
    if tp > 1:
        refuse_tp_degree(tp, facts.tp_sizes)
    if cp > 1 and facts.without_cp is not None:
        raise facts.without_cp


def accepts_axes(tp: int, cp: int, facts: HfFacts) -> bool:
    """Return whether the model can be split by these degrees."""
    try:
        check_hf_axes(tp, cp, facts)
    except UserError:
        return False
    return True
