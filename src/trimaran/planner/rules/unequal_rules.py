"""Which plans can give data ranks different numbers of rows."""

from trimaran.core import Plan, UserError

FIELD = "plan.micro_batches"


def check_micro_batches(plan: Plan) -> None:
    """Raise unless the plan's data ranks can have the rows that `micro_batches` says, or measure them."""
    if not plan.micro_batches:
        return
    rows, dp = plan.rows_by_rank, plan.mesh.dp
    if rows and len(rows) != dp:
        raise _refusal(f"micro_batches has {len(rows)} numbers, but there are {dp} data ranks ({plan.mesh})",
                       f"give {dp} numbers, one for each, or leave it out")  # fmt: skip
    if not plan.engine_traits.uses_fsdp:
        raise _refusal(
            f"engine {plan.engine} gives every rank the same number of rows", "set engine to torch, or leave it out"
        )
    if plan.comm.local.is_on:
        raise _refusal("with local_steps every replica counts as much as any other, whatever its rows",
                       "leave out comm.local_steps, or micro_batches")  # fmt: skip
    if plan.micro_batches == "measured":
        _check_measured(plan)


def can_measure_rows(plan: Plan) -> bool:
    """Return whether a plan whose data ranks have equal rows may have measured ones instead."""
    if plan.micro_batches or plan.mesh.dp == 1:
        return False
    try:
        check_micro_batches(plan.model_copy(update={"micro_batches": "measured"}))
    except UserError:
        return False
    return True


def _check_measured(plan: Plan) -> None:
    """Raise unless each data rank can measure its own speed, and there are rows to deal."""
    mesh = plan.mesh
    explicit = "give the rows of each data rank, such as [3, 5]"
    if mesh.pp > 1:
        raise _refusal("the speed of a pipeline is not measured", f"{explicit}; or use pipeline.stages")
    if mesh.ep > 1:
        raise _refusal("experts that are spread over ranks make them wait for each other, so that the speed of one "
                       "cannot be measured", explicit)  # fmt: skip
    if plan.comm.compression != "none":
        raise _refusal("measuring would change what compression remembers of earlier gradients", explicit)
    if mesh.dp > 1 and plan.micro_batch == 1:
        raise _refusal(f"with a micro_batch of 1 each of {mesh.dp} data ranks needs its one row: there is nothing to "
                       "deal", "set plan.micro_batch to 4 or more, and leave plan.grad_accum out")  # fmt: skip


def _refusal(what: str, fix: str) -> UserError:
    return UserError("P024", what, where=FIELD, fix=fix)
