"""Which plans can train replicas that differ: local steps, asynchronous workers, compressed gradients, unequal rows."""

from trimaran.core import AsyncSgd, Plan, Recipe, UserError
from trimaran.planner.rules.axis_rules import divisors, either

LOCAL_STEPS = "plan.comm.local_steps"


def check_local_steps(plan: Plan, steps: int) -> None:
    """Raise unless replicas can train alone for some of the `steps` of a run, as `comm.local_steps` says."""
    local, outer, comm, mesh = plan.comm.local, plan.comm.local.outer, plan.comm, plan.mesh
    if not local.is_on:
        return
    most, of_outer = local.steps // local.fragments - 1, f"{LOCAL_STEPS}.outer"
    fitting = f"train.steps to {steps + -steps % local.steps}, or local_steps to {either(divisors(steps, most=64))}"
    has_outer_constants = (outer.lr, outer.momentum) != (None, None)
    refusals = (
        (not comm.overlap, "plan.comm.overlap",
         "replicas that train alone reduce no gradients after backward", "leave out overlap"),
        (comm.compression != "none", "plan.comm.compression",
         "with local_steps no gradients are sent between replicas that could be compressed",
         "leave out comm.compression, or local_steps; outer gradients have local_steps.compression"),
        (not plan.engine_traits.uses_fsdp, LOCAL_STEPS,
         "DeepSpeed reduces gradients in every step", "set engine to torch, or leave out local_steps"),
        (mesh.dp_replicate == 1 < mesh.world_size, LOCAL_STEPS,
         f"comm.local_steps needs replicas, but dp_replicate is 1 ({plan})",
         "set mesh.dp_replicate above 1, or leave out local_steps"),
        (mesh.ep > 1, LOCAL_STEPS,
         "experts that are spread over ranks exchange tokens in every step",
         "set mesh.ep to 1, or leave out local_steps"),
        (plan.precision == "fp16", LOCAL_STEPS,
         "fp16 may skip steps, and with local_steps each replica would skip others",
         "use bf16 or fp32, or leave out local_steps"),
        (steps % local.steps, LOCAL_STEPS,
         f"{steps} steps are not a multiple of local_steps {local.steps}", f"set {fitting}"),
        (outer.optimizer == "average" and has_outer_constants, of_outer,
         "an average has neither learning rate nor momentum", "set outer.optimizer to nesterov or sgd"),
        (outer.optimizer == "nesterov" and not outer.resolved_momentum, of_outer,
         "nesterov needs momentum", "set outer.momentum above 0, or outer.optimizer to sgd"),
        (local.compression == "sparse" and outer.resolved_momentum, of_outer,
         "sparse outer gradients have error feedback in place of outer momentum",
         "set outer.optimizer to average, or to sgd without momentum"),
        (local.fragments > local.steps, f"{LOCAL_STEPS}.fragments",
         f"{local.fragments} fragments cannot take turns in {local.steps} steps",
         f"set fragments to {local.steps} or less"),
        (local.overlap_steps > most, f"{LOCAL_STEPS}.overlap_steps",  # nothing is on its way when a checkpoint is saved
         f"an exchange of {local.overlap_steps} steps would not end before the next one begins",
         f"set overlap_steps to {most} or less: below steps / fragments"),
        (local.elastic and (local.fragments > 1 or local.overlap_steps), f"{LOCAL_STEPS}.elastic",
         "an exchange that overlaps training cannot be repeated if a replica is lost during it",
         "leave out fragments and overlap_steps, or elastic"),
    )  # fmt: skip
    for is_wrong, where, what, fix in refusals:
        if is_wrong:
            raise UserError("P003", what, where=where, fix=fix)


def check_async(plan: Plan, recipe: Recipe) -> None:
    """Raise unless `engine: async` can run the plan: whole replicas, whose only exchange is with the servers."""
    if plan.engine != "async":
        if plan.comm.async_sgd != AsyncSgd():
            raise UserError("P095.comm-async-sgd", where="plan.comm.async_sgd", engine=plan.engine)
        return
    mesh = plan.mesh
    if mesh.dp_replicate == 1 or mesh.world_size > mesh.dp_replicate or mesh.ep > 1 or plan.sharding != "none":
        fix = "set mesh.dp_replicate to the number of devices, with sharding none"
        raise UserError("P095.engine-async", where="plan.mesh", fix=fix, plan=plan)
    refusals = {
        "plan.precision": (plan.precision not in ("fp32", "bf16"), "with fp16 or fp8, workers would have scales of "
                           "their own", "use bf16 or fp32"),
        "plan.offload": (plan.offload != "none", "the servers have optimizer and weights in host memory already",
                         "leave out offload"),
        "plan.towers": (bool(plan.towers), "all towers are replicated alike", "leave out towers"),
        "plan.comm.compression": (plan.comm.compression != "none", "gradients are sent to servers uncompressed",
                                  "leave out compression"),
        "plan.comm.local_steps": (plan.comm.local.is_on, "workers send every gradient to the servers",
                                  "leave out local_steps"),
        "plan.comm.overlap": (not plan.comm.overlap, "replicas do not sum gradients", "leave out overlap"),
        "train.optimizer.states": (recipe.train.optimizer.states != "fp32", "the servers' moments are fp32",
                                   "set it to fp32"),
        "model.family": (not recipe.model.kind.is_language_model, f"it does not train the family {recipe.model.family}",
                         "train a decoder, or a language model of Hugging Face"),
        "model.adapter": (recipe.model.adapter is not None, "it does not train adapters", "leave out the adapter"),
        "faults.not_finite": (recipe.faults.not_finite == "rewind", "workers cannot rewind together",
                              "set it to skip or stop"),
        "telemetry.profile": (bool(recipe.telemetry.profile), "it has no step that all ranks could trace",
                              "leave out profile"),
        "telemetry.nvtx": (recipe.telemetry.nvtx, "its workers have no phases to show", "leave out nvtx"),
    }  # fmt: skip
    for where, (is_wrong, why, fix) in refusals.items():
        if is_wrong:
            fix = f"{fix}, or set plan.engine to torch"
            raise UserError("P095.engine-async-cannot-run", where=where, fix=fix, why=why)


SHARDED_KINDS = ("fp16", "bf16", "int8")


def check_compression(plan: Plan) -> None:
    """Raise unless the plan can compress its gradients in the way that it asks for."""
    settings, mesh = plan.comm.compression_settings, plan.mesh
    if settings.kind == "none":
        return
    if not plan.comm.overlap:
        raise UserError("P003.compression-own-way", where="plan.comm.overlap")
    is_split = not plan.engine_traits.uses_fsdp or mesh.pp > 1 or mesh.ep > 1
    if is_split or (plan.sharding == "none" and mesh.tp > 1) or any(each.sharding for each in plan.towers.values()):
        raise UserError("P003.comm-compression", where="plan.comm.compression", plan=plan)
    if plan.sharding == "none":
        return
    if settings.kind not in SHARDED_KINDS or settings.keeps_residual:
        what = f"{settings.kind} with error feedback" if settings.kind in SHARDED_KINDS else settings.kind
        raise UserError("P003.needs-full-replicas", where="plan.comm.compression", text=what)
    if settings.layers:
        raise UserError("P003.under-sharding", where="plan.comm.compression.layers")
    if mesh.tp > 1 and mesh.dp_replicate > 1:
        raise UserError("P003.gradients-tensor-parallel", where="plan.comm.compression")


def check_micro_batches(plan: Plan) -> None:
    """Raise unless the plan's data ranks can have the rows that `micro_batches` says, or measure them."""
    if not plan.micro_batches:
        return
    rows, dp, is_measured = plan.rows_by_rank, plan.mesh.dp, plan.micro_batches == "measured"
    explicit = "give the rows of each data rank, such as [3, 5]"
    refusals = (
        (rows and len(rows) != dp,
         f"micro_batches has {len(rows)} numbers, but there are {dp} data ranks ({plan.mesh})",
         f"give {dp} numbers, one for each, or leave it out"),
        (not plan.engine_traits.uses_fsdp,
         f"engine {plan.engine} gives every rank the same number of rows", "set engine to torch, or leave it out"),
        (plan.comm.local.is_on,
         "with local_steps every replica counts as much as any other, whatever its rows",
         "leave out comm.local_steps, or micro_batches"),
        (is_measured and plan.mesh.pp > 1,
         "the speed of a pipeline is not measured", f"{explicit}; or use pipeline.stages"),
        (is_measured and plan.mesh.ep > 1,
         "experts that are spread over ranks make them wait for each other, so that the speed of one cannot be "
         "measured", explicit),
        (is_measured and plan.comm.compression != "none",
         "measuring would change what compression remembers of earlier gradients", explicit),
        (is_measured and dp > 1 and plan.micro_batch == 1,
         f"with a micro_batch of 1 each of {dp} data ranks needs its one row: there is nothing to deal",
         "set plan.micro_batch to 4 or more, and leave plan.grad_accum out"),
    )  # fmt: skip
    for is_wrong, what, fix in refusals:
        if is_wrong:
            raise UserError("P024", what, where="plan.micro_batches", fix=fix)


def can_measure_rows(plan: Plan) -> bool:
    """Return whether a plan whose data ranks have equal rows may have measured ones instead."""
    if plan.micro_batches or plan.mesh.dp == 1:
        return False
    try:
        check_micro_batches(plan.model_copy(update={"micro_batches": "measured"}))
    except UserError:
        return False
    return True
