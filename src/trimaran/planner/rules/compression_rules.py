"""Which plans can compress their gradients."""

from trimaran.core import Plan, UserError

SHARDED_KINDS = ("fp16", "bf16", "int8")


def check_compression(plan: Plan) -> None:
    """Raise unless the plan can compress its gradients in the way that it asks for."""
    settings, mesh = plan.comm.compression_settings, plan.mesh
    if settings.kind == "none":
        return
    if not plan.comm.overlap:
        raise UserError("P003", "compression has its own way of reducing gradients",
                        where="plan.comm.overlap", fix="leave out overlap")  # fmt: skip
    is_split = not plan.engine_traits.uses_fsdp or mesh.pp > 1 or mesh.ep > 1
    if is_split or (plan.sharding == "none" and mesh.tp > 1) or any(each.sharding for each in plan.towers.values()):
        raise UserError("P003", f"comm.compression needs full replicas or shards, but this plan splits the model in "
                        f"another way ({plan})", where="plan.comm.compression", fix="use dp_replicate alone with "
                        "sharding none, or dp_shard with sharding, without pp and ep; or leave it out")  # fmt: skip
    if plan.sharding == "none":
        return
    if settings.kind not in SHARDED_KINDS or settings.keeps_residual:
        what = f"{settings.kind} with error feedback" if settings.kind in SHARDED_KINDS else settings.kind
        raise UserError("P003", f"{what} needs full replicas: under sharding no rank has room for what it has not sent "
                        "of the whole gradient", where="plan.comm.compression",
                        fix="use int8, bf16 or fp16 without error feedback, or dp_replicate alone with sharding "
                        "none")  # fmt: skip
    if settings.layers:
        raise UserError("P003", "under sharding all gradients of a block are reduced together, so layers cannot be "
                        "chosen", where="plan.comm.compression.layers", fix="leave out layers")  # fmt: skip
    if mesh.tp > 1 and mesh.dp_replicate > 1:
        raise UserError("P003", "gradients of tensor-parallel shards cannot be compressed between replicas",
                        where="plan.comm.compression", fix="use dp_shard alone beside tp, or leave it out")  # fmt: skip
