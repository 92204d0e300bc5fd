"""Which plans can train asynchronously."""

from trimaran.core import Plan, Recipe, UserError
from trimaran.core.replica_sync import AsyncSgd


def check_async(plan: Plan, recipe: Recipe) -> None:
    """Raise unless `engine: async` can run the plan: whole replicas, whose only exchange is with the servers."""
    if plan.engine != "async":
        if plan.comm.async_sgd != AsyncSgd():
            raise _refusal(f"comm.async_sgd is for engine async, and this plan has engine {plan.engine}",
                           "set plan.engine to async, or leave out async_sgd", where="plan.comm.async_sgd")  # fmt: skip
        return
    mesh = plan.mesh
    if mesh.dp_replicate == 1 or mesh.world_size > mesh.dp_replicate or mesh.ep > 1 or plan.sharding != "none":
        raise _refusal(f"engine async needs whole replicas, at least two, and this plan has another split ({plan})",
                       "set mesh.dp_replicate to the number of devices, with sharding none",
                       where="plan.mesh")  # fmt: skip
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
            raise _refusal(f"engine async cannot run this: {why}", f"{fix}, or set plan.engine to torch", where=where)


def _refusal(what: str, fix: str, *, where: str) -> UserError:
    return UserError("P095", what, where=where, fix=fix)
