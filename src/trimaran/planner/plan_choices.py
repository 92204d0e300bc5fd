"""What the planner chooses beside the mesh: how the loss is computed, bucket size and prefetch depth."""

from typing import NamedTuple

from trimaran.core import Plan
from trimaran.core.plugins import KINDS
from trimaran.cost import predict
from trimaran.cost.collective import GatheredUnit, exposed_gathers, exposed_reduction
from trimaran.cost.gradient_traffic import traffic_path_on, unit_seconds
from trimaran.cost.job import ELEMENT_BYTES, chunk_rows, frees_weights
from trimaran.cost.stage_time import StageTime, stage_inputs_on, stage_times_of
from trimaran.cost.step_time import step_time_of, with_joined_units
from trimaran.planner.question import Question

FUSED, CHUNKED = "fused", "chunked"


class LossChoices(NamedTuple):
    """What a question leaves open about the loss."""

    pinned: str  # the user's choice; empty if there is none
    can_fuse: bool  # whether the head can be fused with the loss
    rows: int  # of one sample's logits
    outputs: int  # columns of the logits

    def on(self, tp: int, pp: int, wanted: str = "") -> str:
        """Return how the loss is computed on such a mesh: as pinned, else as wished, else fused if possible.

        A tensor-parallel rank has no complete row of logits, and a pipeline stage must return them.
        """
        if self.pinned:
            return self.pinned
        return (wanted or FUSED) if self.can_fuse and tp == pp == 1 else "logits"

    def can_chunk(self, micro_batch: int, *, tp: int, pp: int, cp: int) -> bool:
        """Return whether a chunked loss is possible, and the logits of a micro-batch exceed one chunk."""
        if self.pinned or not self.can_fuse or tp * pp > 1:
            return False
        rows = micro_batch * self.rows // cp
        return chunk_rows(rows, self.outputs, ELEMENT_BYTES["bf16"]) < rows


def losses_of(question: Question) -> LossChoices:
    """Return the choices that the question leaves open.

    Only our trainer fuses head and loss, only for language models, and only if nothing comes between the two.
    """
    pins, outline = question.pins, question.outline
    ours = question.stack.name == "trimaran" and not pins.engine_traits.needs_logits
    main = outline.main if outline else None
    has_logits = main is not None and main.outputs > 0 and main.bare_head
    is_plugin = question.recipe.objective.name not in KINDS["objective"].reserved  # which takes logits
    return LossChoices(
        pinned=pins.loss if "loss" in pins.model_fields_set else "",
        can_fuse=ours and has_logits and not is_plugin,
        rows=main.sample_positions(question.recipe.data.seq_len)[0] if main else 0,
        outputs=main.outputs if main else 0,
    )


# Both have defaults that are right on fast links. Another value is chosen only if it shortens the predicted step by
# more than `MIN_GAIN_FRACTION`. Pinned values stay.

MEBIBYTE = 1 << 20
BUCKET_SIZES_MB = (1, 2, 5, 10, 25, 50, 100, 200, 400)  # of DDP
UNIT_SIZES_MB = (10, 25, 50, 100)  # of FSDP units, which need memory for their gathered weights
PREFETCHES = (2, 3, 4)
MIN_GAIN_FRACTION = 0.01  # of a step
SURE_FRACTION = 0.75  # of the predicted backward: a size that hides all communication only just is not the best


class CommChoice(NamedTuple):
    """A plan with chosen communication settings, and for each that differs from its default the reason."""

    plan: Plan
    reasons: tuple[str, ...] = ()


def choose_comm(plan: Plan, question: Question) -> CommChoice:
    """Return the plan with the bucket size and prefetch depth that expose the least communication."""
    if question.outline is None or not plan.engine_traits.uses_fsdp or plan.mesh.data == 1:
        return CommChoice(plan)
    if not question.for_trainer or question.job.stack.name != "trimaran":
        return CommChoice(plan)
    pinned, reasons = question.pins.comm.model_fields_set, list[str]()
    if "bucket_mb" not in pinned:
        plan, reason = _with_bucket(plan, question)
        reasons += reason
    if "prefetch" not in pinned:
        plan, reason = _with_prefetch(plan, question)
        reasons += reason
    return CommChoice(plan, tuple(reasons))


def _with_bucket(plan: Plan, question: Question) -> CommChoice:
    """Return the plan with the best bucket size: of DDP's reductions, or of FSDP units, which small layers share."""
    mesh, comm, now = plan.mesh, plan.comm, plan.comm.bucket_mb
    seconds: dict[int, float] = {}
    if mesh.tp * mesh.pp * mesh.ep > 1 or plan.towers or plan.offload != "none":
        return CommChoice(plan)  # beside tp, pp or ep ranks reduce block by block, without buckets
    if plan.sharding != "none":
        for size in sorted({*UNIT_SIZES_MB, now}):
            changed = plan.model_copy(update={"comm": comm.model_copy(update={"bucket_mb": size})})
            seconds[size] = _step_seconds(changed, question)
    elif comm.overlap and comm.compression == "none" and not comm.local.is_on:
        stage, path = _stage(plan, question), traffic_path_on(question.job, question.cluster, plan)
        num_bytes = path.replica_bytes * sum(unit.count * unit.trained_dense for unit in stage.units)
        window = SURE_FRACTION * path.overlap_fraction * stage.backward
        for size in sorted({*BUCKET_SIZES_MB, now}) if num_bytes else ():
            seconds[size] = exposed_reduction(num_bytes, size * MEBIBYTE, path.dense.replicas, window)
    if now not in seconds:
        return CommChoice(plan)
    best = min(seconds, key=lambda size: (seconds[size], abs(size - now)))
    gain = (seconds[now] - seconds[best]) / _step_seconds(plan, question)
    if gain <= MIN_GAIN_FRACTION:
        return CommChoice(plan)
    chosen = plan.model_copy(update={"comm": plan.comm.model_copy(update={"bucket_mb": best})})
    if plan.sharding != "none" and not predict(question.job, question.cluster, chosen).fits:
        return CommChoice(plan)
    what = "gradients are reduced" if plan.sharding == "none" else "small layers share units"
    return CommChoice(chosen, (f"comm.bucket_mb {best}: {what} in pieces of {best} MiB instead of {now}, which should "
                               f"shorten steps by {gain:.1%}",))  # fmt: skip


def _with_prefetch(plan: Plan, question: Question) -> CommChoice:
    """Return the plan with the least prefetch depth that hides clearly more gathers, if its memory allows that."""
    if plan.sharding == "none" or plan.mesh.pp > 1 or plan.comm.prefetch != 1:
        return CommChoice(plan)
    path = traffic_path_on(question.job, question.cluster, plan)
    if not path.overlap_fraction:
        return CommChoice(plan)
    # How long a step waits for weights of blocks. Embedding and head are gathered before and after them.
    *blocks, _ = with_joined_units(question.job, plan, _stage(plan, question)).units
    forward, backward = list[GatheredUnit](), list[GatheredUnit]()
    for unit in blocks:
        gather, _ = unit_seconds(path, unit, unit.sharding or plan.sharding)
        forward += [GatheredUnit(gather, path.overlap_fraction * unit.forward)] * unit.count
        backward += [GatheredUnit(gather, path.overlap_fraction * unit.backward)] * unit.count
    waits = {depth: exposed_gathers(forward, depth) for depth in (1, *PREFETCHES)}
    if frees_weights(plan, plan.sharding):
        for depth, once in waits.items():
            waits[depth] = plan.grad_accum * (once + exposed_gathers(backward[::-1], depth))
    step = _step_seconds(plan, question)
    least = min(waits.values())
    if (waits[1] - least) / step <= MIN_GAIN_FRACTION:
        return CommChoice(plan)
    best = next(depth for depth in PREFETCHES if waits[depth] - least <= MIN_GAIN_FRACTION * step)
    chosen = plan.model_copy(update={"comm": plan.comm.model_copy(update={"prefetch": best})})
    if not predict(question.job, question.cluster, chosen).fits:
        return CommChoice(plan)
    gain = (waits[1] - waits[best]) / step
    return CommChoice(chosen, (f"comm.prefetch {best}: some gathers of weights take longer than the compute of one "
                               f"block before them; this should shorten steps by {gain:.1%}",))  # fmt: skip


def _stage(plan: Plan, question: Question) -> StageTime:
    return stage_times_of(stage_inputs_on(question.job, question.cluster, plan)).heaviest


def _step_seconds(plan: Plan, question: Question) -> float:
    return sum(step_time_of(question.job, question.cluster, plan).terms.values())
