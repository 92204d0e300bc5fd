"""Checks a plan by what our trainer can do with a Hugging Face model, as its code says."""

from trimaran.core import Plan, Recipe, UserError
from trimaran.core.engine_rules import no_fp8_layers
from trimaran.models.hf_facts import HfFacts, refuse_ep_degree, refuse_seq_len, refuse_tp_degree
from trimaran.planner.question import isolates_documents


def check_hf_facts(plan: Plan, recipe: Recipe, facts: HfFacts | None) -> None:
    """Raise the mistake that a worker would raise for this plan. Without facts, only the worker knows."""
    if facts is None:
        return
    if facts.untrainable is not None:
        raise facts.untrainable
    if facts.max_seq_len:
        refuse_seq_len(recipe.data.seq_len, facts.max_seq_len)
    if facts.without_documents and recipe.data.seq_len > facts.longest_packed_row and isolates_documents(recipe.data):
        raise facts.without_documents
    if plan.precision == "fp8" and not facts.has_fp8_layers:
        raise no_fp8_layers()
    mesh = plan.mesh
    check_hf_axes(facts, tp=mesh.tp, cp=mesh.cp, pp=mesh.pp, ep=mesh.ep)
    if mesh.pp > 1 and facts.num_layers:
        check_hf_stages(plan, facts.num_layers)


def check_hf_stages(plan: Plan, num_layers: int) -> None:
    """Raise unless every stage of the pipeline has a layer."""
    stages = plan.pipeline.stages
    if plan.num_stages > num_layers or (stages and sum(stages) != num_layers):
        raise UserError("P011", f"{plan.num_stages} stages do not hold the {num_layers} layers of the model once",
                        where="plan.pipeline.stages" if stages else "plan.mesh.pp",
                        fix="use at most one stage for each layer, and leave plan.pipeline.stages out")  # fmt: skip


def check_hf_axes(facts: HfFacts, *, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1) -> None:
    """Raise if the model cannot be split by these degrees."""
    for degree, mistake in ((pp, facts.without_pp), (ep, facts.without_ep)):
        if degree > 1 and mistake is not None:
            raise mistake
    if tp > 1 and facts.without_tp is not None:
        raise facts.without_tp
    if tp > 1:
        refuse_tp_degree(tp, facts.tp_sizes)
    refuse_ep_degree(ep, tp, facts.num_experts)
    if cp > 1 and facts.without_cp is not None:
        raise facts.without_cp


def accepts_axes(facts: HfFacts, *, tp: int, cp: int, ep: int) -> bool:
    """Return whether the model can be split by these degrees."""
    try:
        check_hf_axes(facts, tp=tp, cp=cp, ep=ep)
    except UserError:
        return False
    return True
