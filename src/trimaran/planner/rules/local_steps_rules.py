"""Which plans allow replicas to train alone for some steps."""

from trimaran.core import Plan, UserError
from trimaran.planner.degrees import divisors, either

FIELD = "plan.comm.local_steps"


def check_local_steps(plan: Plan, steps: int) -> None:
    """Raise unless replicas can train alone for some of the `steps` of a run, as `comm.local_steps` says."""
    local, mesh = plan.comm.local, plan.mesh
    if not local.is_on:
        return
    if not plan.comm.overlap:
        raise _refusal("replicas that train alone reduce no gradients after backward", "leave out overlap",
                       where="plan.comm.overlap")  # fmt: skip
    if plan.comm.compression != "none":
        raise _refusal("with local_steps no gradients are sent between replicas that could be compressed",
                       "leave out comm.compression, or local_steps; outer gradients have local_steps.compression",
                       where="plan.comm.compression")  # fmt: skip
    if not plan.engine_traits.uses_fsdp:
        raise _refusal("DeepSpeed reduces gradients in every step", "set engine to torch, or leave out local_steps")
    if mesh.dp_replicate == 1 and mesh.world_size > 1:
        raise _refusal(f"comm.local_steps needs replicas, but dp_replicate is 1 ({plan})",
                       "set mesh.dp_replicate above 1, or leave out local_steps")  # fmt: skip
    if mesh.ep > 1:
        raise _refusal("experts that are spread over ranks exchange tokens in every step",
                       "set mesh.ep to 1, or leave out local_steps")  # fmt: skip
    if plan.precision == "fp16":
        raise _refusal("fp16 may skip steps, and with local_steps each replica would skip others",
                       "use bf16 or fp32, or leave out local_steps")  # fmt: skip
    if steps % local.steps:
        raise _refusal(f"{steps} steps are not a multiple of local_steps {local.steps}",
                       f"set train.steps to {steps + -steps % local.steps}, or local_steps to "
                       f"{either(divisors(steps, most=64))}")  # fmt: skip
    _check_outer(plan)
    if local.elastic:
        _check_elastic(plan)


def _check_elastic(plan: Plan) -> None:
    """Raise unless the other replicas could go on without one of them."""
    local, where = plan.comm.local, f"{FIELD}.elastic"
    if local.fragments > 1 or local.overlap_steps:
        raise _refusal("an exchange that overlaps training cannot be repeated if a replica is lost during it",
                       "leave out fragments and overlap_steps, or elastic", where=where)  # fmt: skip


def _check_outer(plan: Plan) -> None:
    """Raise when the options of local steps contradict each other."""
    local, outer = plan.comm.local, plan.comm.local.outer
    if outer.optimizer == "average" and (outer.lr, outer.momentum) != (None, None):
        raise _refusal("an average has neither learning rate nor momentum", "set outer.optimizer to nesterov or sgd",
                       where=f"{FIELD}.outer")  # fmt: skip
    if outer.optimizer == "nesterov" and not outer.resolved_momentum:
        raise _refusal("nesterov needs momentum", "set outer.momentum above 0, or outer.optimizer to sgd",
                       where=f"{FIELD}.outer")  # fmt: skip
    if local.compression == "sparse" and outer.resolved_momentum:
        fix = "set outer.optimizer to average, or to sgd without momentum"
        raise _refusal("sparse outer gradients have error feedback in place of outer momentum", fix,
                       where=f"{FIELD}.outer")  # fmt: skip
    if local.fragments > local.steps:
        raise _refusal(f"{local.fragments} fragments cannot take turns in {local.steps} steps",
                       f"set fragments to {local.steps} or less", where=f"{FIELD}.fragments")  # fmt: skip
    most = local.steps // local.fragments - 1
    if local.overlap_steps > most:  # so that nothing is on its way when a checkpoint is saved
        fix = f"set overlap_steps to {most} or less: below steps / fragments"
        raise _refusal(f"an exchange of {local.overlap_steps} steps would not end before the next one begins", fix,
                       where=f"{FIELD}.overlap_steps")  # fmt: skip


def _refusal(what: str, fix: str, *, where: str = FIELD) -> UserError:
    return UserError("P003", what, where=where, fix=fix)
