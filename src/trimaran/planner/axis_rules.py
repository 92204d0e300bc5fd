"""What each axis asks of the model: degrees that divide what they split."""

import math

from trimaran.core import Plan, Recipe, UserError
from trimaran.models import ModelSpec, VlmSpec
from trimaran.models.perception_spec import PerceptionSpec
from trimaran.models.stages import Spec
from trimaran.planner.degrees import degrees, divisors, either, multiples_around

SEVERAL_STAGES = ("interleaved", "zero-bubble")


def check_axes(plan: Plan, recipe: Recipe, spec: Spec | None) -> None:
    """Raise when a degree does not divide what it splits. Of a foreign model only the worker knows the shape."""
    if recipe.model.family == "hf":
        check_foreign(plan, spec)
    check_pipeline(plan, recipe)
    if isinstance(spec, PerceptionSpec):
        check_scenes(plan)
    if spec is not None:
        check_tensor(plan, spec, whole_vocabulary=recipe.model.family == "hf")
        check_stages(plan, spec)
    if (language := language_of(spec)) is not None:
        check_context(plan, language)
        check_experts(plan, language)
    if not isinstance(spec, PerceptionSpec):
        check_positions(plan, recipe, known=spec is not None)


def language_of(spec: Spec | None) -> ModelSpec | None:
    """Return the decoder that the network is, or has; None without one."""
    return spec.language if isinstance(spec, VlmSpec) else spec if isinstance(spec, ModelSpec) else None


def check_scenes(plan: Plan) -> None:
    """Raise for the axes that a perception model has nothing for: it has neither sequences nor experts."""
    for axis, what in (("cp", "sequences to cut"), ("ep", "experts to spread")):
        if getattr(plan.mesh, axis) > 1:
            raise UserError("P055", f"a perception model has no {what}", where=f"plan.mesh.{axis}",
                            fix=f"set {axis} to 1, and use dp_shard, dp_replicate, pp or tp")  # fmt: skip


def check_foreign(plan: Plan, spec: Spec | None) -> None:
    """Raise for the axes that cut a network's forward: a Hugging Face model's is not ours."""
    refused, sees = {"pp": "is not cut into stages", "ep": "keeps its experts together"}, isinstance(spec, VlmSpec)
    fix = "use tp or dp_shard, or family decoder where the architecture is Llama's or Qwen's"
    if sees:
        refused |= {"tp": "that sees stays whole", "cp": "that sees takes whole sequences"}
        fix = "use dp_shard or dp_replicate, or family vlm, which every axis cuts"
    for axis, what in refused.items():
        if getattr(plan.mesh, axis) > 1:
            raise UserError("P013", f"a Hugging Face model {what}: its forward is not ours to cut",
                            where=f"plan.mesh.{axis}", fix=fix)  # fmt: skip


def check_tensor(plan: Plan, spec: Spec, *, whole_vocabulary: bool = False) -> None:
    """Raise unless tp divides the heads and every width that it splits; a Hugging Face vocabulary may stay whole."""
    tp = plan.mesh.tp
    if tp > 1 and isinstance(spec, VlmSpec) and spec.vision.block.qk_norm and tower_degree("vision", plan) > 1:
        raise UserError("P054", f"the vision of {spec.name} norms all heads together, and tp {tp} would part them",
                        where="plan.towers.vision.tp", fix="set it to 1: every rank then has the tower whole, and "
                        "looks at other images")  # fmt: skip
    sizes = tensor_sizes(spec, plan, whole_vocabulary=whole_vocabulary)
    works = degrees(math.gcd(*sizes.values()), world_size=plan.mesh.world_size)
    for name, size in sizes.items():
        if size % tp:
            raise UserError("P008", f"tp {tp} does not divide the {size:,} {name} of {spec.name}",
                            where="plan.mesh.tp", fix=f"use tp of {works}")  # fmt: skip


def tensor_sizes(spec: Spec, plan: Plan, *, whole_vocabulary: bool = False) -> dict[str, int]:
    """Return what tp splits, by name: heads and widths, of every tower that does not stay whole."""
    if isinstance(spec, PerceptionSpec):
        return {"heads of the fusion": spec.heads, "features of the fusion's feed-forward": spec.ffn}
    if isinstance(spec, VlmSpec):
        sizes = tensor_sizes(spec.language, plan)
        if tower_degree("vision", plan) > 1:
            sizes |= {"heads of the vision": spec.vision.heads}
            sizes |= {"features of the vision's feed-forward": spec.vision.ffn}
        if tower_degree("projector", plan) > 1:
            sizes |= {"features of the projector": spec.projector_middle}
        return sizes
    experts, sizes = spec.block.experts, {"heads": spec.heads, "KV heads": spec.kv_heads}
    if experts is None:
        sizes["features of the feed-forward"] = spec.ffn
    else:
        sizes["features of an expert"] = experts.ffn
        sizes |= {"features of the shared expert": experts.shared_ffn} if experts.shared_ffn else {}
    if not whole_vocabulary:
        sizes["tokens of the vocabulary"] = spec.vocab
    return sizes


def tower_degree(tower: str, plan: Plan) -> int:
    """Return how many ranks share each matrix of the tower."""
    own = plan.towers.get(tower)
    return plan.mesh.tp if own is None or own.tp is None else own.tp


def check_context(plan: Plan, spec: ModelSpec) -> None:
    """Raise unless cp divides the heads that ranks exchange."""
    mesh = plan.mesh
    if plan.comm.context == "gather" or mesh.cp == 1:
        return
    works = degrees(math.gcd(spec.heads, spec.kv_heads) // mesh.tp, world_size=mesh.world_size)
    for name, heads in (("heads", spec.heads // mesh.tp), ("KV heads", spec.kv_heads // mesh.tp)):
        if heads % mesh.cp:
            raise UserError("P009", f"cp {mesh.cp} does not divide the {heads} {name} of {spec.name} that a rank "
                            "exchanges", where="plan.mesh.cp",
                            fix=f"use cp of {works}, or set comm.context to gather")  # fmt: skip


def check_positions(plan: Plan, recipe: Recipe, *, known: bool) -> None:
    """Raise unless a sequence can be cut into the pieces that cp and tp work on.

    To gather keys, a rank holds one piece from the front and one from the back, so there are 2 x cp of them. The slices
    of a decoder also split the positions of their piece; a Hugging Face model's do not.
    """
    mesh, seq_len = plan.mesh, recipe.data.seq_len
    pieces = mesh.cp * (2 if mesh.cp > 1 and plan.comm.context == "gather" else 1)
    if seq_len % pieces:
        each = pieces // mesh.cp  # a rank's pieces; a sequence that these do not divide cannot be cut at all
        works = degrees(1 if seq_len % each else seq_len // each, world_size=mesh.world_size)
        raise UserError("P009", f"a sequence of {seq_len:,} does not split into the {pieces} equal pieces of cp "
                        f"{mesh.cp}", where="data.seq_len", fix=f"set it to {multiples_around(seq_len, pieces)}, or "
                        f"use cp of {works}")  # fmt: skip
    if known and recipe.model.family in ("decoder", "vlm") and seq_len // mesh.cp % mesh.tp:
        step = math.lcm(pieces, mesh.cp * mesh.tp)
        raise UserError("P008", f"tp {mesh.tp} does not divide the {seq_len // mesh.cp:,} positions of a rank",
                        where="data.seq_len", fix=f"set it to {multiples_around(seq_len, step)}, or use tp of "
                        f"{degrees(seq_len // mesh.cp, world_size=mesh.world_size)}")  # fmt: skip


def check_experts(plan: Plan, spec: ModelSpec) -> None:
    """Raise unless there are experts, and ep divides them and the ranks that they may be spread over."""
    mesh, experts = plan.mesh, spec.block.experts
    if mesh.ep == 1:
        return
    if experts is None:
        raise UserError("P010", f"ep {mesh.ep} spreads experts, and {spec.name} has none", where="plan.mesh.ep",
                        fix="set ep to 1, or choose a model with experts, such as tiny-moe")  # fmt: skip
    ranks, over = mesh.expert_ranks, "dp_shard x cp" if mesh.dp_shard > 1 else "dp_replicate x cp"
    works = degrees(math.gcd(experts.num_experts, ranks), world_size=ranks)
    for name, size in ((f"experts of {spec.name}", experts.num_experts), (f"ranks of {over}", ranks)):
        if size % mesh.ep:
            raise UserError("P010", f"ep {mesh.ep} does not divide the {size} {name}", where="plan.mesh.ep",
                            fix=f"use ep of {works}")  # fmt: skip


def check_stages(plan: Plan, spec: Spec) -> None:
    """Raise unless the stages hold every layer once, as many stages as the schedule takes, none of them empty."""
    pp, stages, schedule = plan.mesh.pp, plan.pipeline.stages, plan.pipeline.schedule
    if pp == 1 and not stages:
        return
    if pp == 1:
        raise UserError("P011", f"there are {len(stages)} stages, and pp is 1", where="plan.pipeline.stages",
                        fix=f"set mesh.pp to {len(stages)}, or leave the stages out")  # fmt: skip
    if stages and not takes_stages(schedule, len(stages) / pp):
        takes = f"{pp}" if schedule not in SEVERAL_STAGES else f"{2 * pp}"
        takes += f", {3 * pp} or more in steps of {pp}" if schedule == "interleaved" else ""
        raise UserError("P011", f"{schedule} on pp {pp} does not take {len(stages)} stages",
                        where="plan.pipeline.stages", fix=f"list {takes}, or leave them out")  # fmt: skip
    if plan.num_stages > spec.layers:
        most = spec.layers // (plan.num_stages // pp)
        fix = f"use pp of at most {most}" if most > 1 else "use a schedule with fewer stages, or a deeper model"
        raise UserError("P011", f"{plan.num_stages} stages are more than the {spec.layers} layers of {spec.name}",
                        where="plan.mesh.pp", fix=fix)  # fmt: skip
    if stages and (sum(stages) != spec.layers or min(stages) < 1):
        raise UserError("P011", f"stages of {', '.join(map(str, stages))} layers do not make up the {spec.layers} of "
                        f"{spec.name}", where="plan.pipeline.stages",
                        fix="give every stage at least one layer and all of them together "
                        f"{spec.layers}, or leave them out")  # fmt: skip


def check_pipeline(plan: Plan, recipe: Recipe) -> None:
    """Raise when a pipeline cannot be: with too few micro-batches, or a backward that cannot be cut."""
    pp, schedule, count = plan.mesh.pp, plan.pipeline.schedule, plan.grad_accum
    if pp == 1:
        return
    if not fills(plan, count):
        share = recipe.train.global_batch // plan.mesh.dp
        works = [size for size in divisors(share, most=64) if fills(plan, share // size)]
        fix = f"set train.global_batch to {plan.mesh.dp * pp} or a multiple of it, or use a lower pp"
        if works:
            fix = f"set plan.micro_batch to {either(works)} and leave plan.grad_accum out"
        why = f"fewer than its {pp} ranks" if count < pp else f"no multiple of its {count // pp} rounds"
        num = f"{count} micro-batches" if count > 1 else "one micro-batch"
        raise UserError("P012", f"{schedule} on pp {pp} does not run with {num}, {why}",
                        where="plan.grad_accum", fix=fix)  # fmt: skip
    check_cut_backward(plan)


def check_cut_backward(plan: Plan) -> None:
    """Raise for what cannot be when backward is cut in two, for the input and for the weights."""
    if plan.pipeline.schedule != "zero-bubble":
        return
    for field, off, why in (
        ("compile", False, "a compiled backward cannot be cut in two"),
        ("recompute", "none", "each piece of its backward would compute the layer again"),
    ):
        if getattr(plan, field) != off:
            raise UserError("P018", f"zero-bubble does not go with {field}: {why}", where=f"plan.{field}",
                            fix=f"set {field} to {str(off).lower()}, or use another schedule")  # fmt: skip


def fills(plan: Plan, num_micro_batches: int) -> bool:
    """Return whether the pipeline's schedule takes so many micro-batches."""
    return takes_micro_batches(plan.pipeline.schedule, plan.mesh.pp, num_micro_batches)


def takes_micro_batches(schedule: str, pp: int, num_micro_batches: int) -> bool:
    """Return whether a schedule on so many ranks takes so many micro-batches.

    Fewer than there are ranks would leave some idle throughout, and 1F1B does not start with them. Interleaved goes in
    rounds of at least `pp`, all alike.
    """
    rounds = max(1, num_micro_batches // pp) if schedule == "interleaved" else 1
    return num_micro_batches >= pp and num_micro_batches % rounds == 0


def takes_stages(schedule: str, stages_a_rank: float) -> bool:
    """Return whether a rank of the schedule holds so many stages."""
    if schedule == "interleaved":
        return stages_a_rank >= 2 and stages_a_rank.is_integer()
    return stages_a_rank == (2 if schedule == "zero-bubble" else 1)
