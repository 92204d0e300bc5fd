"""What engines ask of a plan: the layer sizes of fp8, the units of FSDP, the configuration of DeepSpeed."""

from importlib.util import find_spec
from operator import attrgetter
from typing import Any

from trimaran.core.errors import UserError
from trimaran.core.plan import Plan
from trimaran.core.recipe import TrainSection

# Linear layers run in fp8 if they have at least this many features (below that, the casts cost more than the matmul
# saves), in multiples of the 16 bytes that a tensor core reads at a time.
MIN_FP8_FEATURES, FP8_FEATURE_MULTIPLE = 256, 16
FP8_BLOCK, MX_BLOCK = 128, 32  # values that share a scale in the recipes `block` and `mx`
# Features of a layer that each recipe needs a multiple of. The matmuls of `mx` sum over whole blocks only.
RECIPE_MULTIPLES = {"tensor": FP8_FEATURE_MULTIPLE, "block": FP8_BLOCK, "mx": MX_BLOCK}


def refuse_missing_packages(plan: Plan) -> None:
    """Raise if the plan needs a package that is not installed here. Nothing is imported."""
    package = plan.engine_traits.package
    if package and find_spec(package) is None:
        raise deepspeed_missing(f"No module named '{package}'")


def no_fp8_layers(recipe: str = "tensor") -> UserError:
    """Return the error for a model without layers that are large enough for fp8."""
    return UserError(
        "P034.no-layer-model",
        where="plan.precision",
        min_fp8_features=MIN_FP8_FEATURES,
        recipe_multiples=RECIPE_MULTIPLES[recipe],
    )


def refused_recipe(recipe: str, device: str) -> UserError:
    """Return the error for a device whose tensor cores do not have the scales of a recipe."""
    needs = {"block": "Hopper GPUs (H100, H200, H800)", "mx": "Blackwell GPUs (B200, GB200)"}[recipe]
    return UserError("P113.no-fp8-matmuls", where="plan.fp8.recipe", device=device, recipe=recipe, needs=needs)


def deepspeed_missing(reason: str) -> UserError:
    return UserError("P037.engine-deepspeed", where="plan.engine", reason=reason)


MEBIBYTE = 1 << 20
GRADIENT_BYTES = 4  # per parameter: FSDP reduces gradients in fp32


def num_units(plan: Plan, block_parameters: float, num_blocks: int) -> int:
    """Return how many units so many equal decoder layers are.

    A unit costs host time in every micro-batch, and the latency of its collectives. So small blocks are joined, to
    units whose gradients are about as large as a bucket of DDP (`plan.comm.bucket_mb`). Not in a pipeline, whose stages
    are cut elsewhere, with experts that have units of their own, or with anything offloaded.
    """
    block_bytes, min_bytes = GRADIENT_BYTES * block_parameters, MEBIBYTE * plan.comm.bucket_mb
    is_sharded = plan.sharding != "none" and plan.engine_traits.uses_fsdp
    if block_bytes >= min_bytes or not is_sharded or plan.offload != "none" or plan.mesh.pp * plan.mesh.ep > 1:
        return num_blocks
    return max(1, round(num_blocks * block_bytes / min_bytes))


def unit_sizes(plan: Plan, block_parameters: float, num_blocks: int) -> list[int]:
    """Return the number of blocks of each unit, in order; they differ by one at most."""
    count = num_units(plan, block_parameters, num_blocks)
    size, left = divmod(num_blocks, count)
    return [size + (index < left) for index in range(count)]


STAGES = {"none": 0, "optimizer": 1, "gradients": 2, "parameters": 3}
PERSISTENT_ELEMENTS = 10_000  # smaller parameters stay unsharded under ZeRO-3: gathering them costs more than it saves
# The loss scale behaves as without DeepSpeed: halved at every overflow, doubled after a window of good steps.
LOSS_SCALE = {
    "loss_scale": 0,  # dynamic
    "initial_scale_power": 16,
    "loss_scale_window": 2000,
    "hysteresis": 1,
    "min_loss_scale": 1,
}
# The values of plan fields that DeepSpeed supports. It does not touch the fields that are not listed.
SUPPORTED_VALUES: dict[str, tuple[object, ...]] = {
    "mesh.tp": (1,),
    "mesh.pp": (1,),
    "mesh.cp": (1,),
    "mesh.ep": (1,),
    "precision": ("fp32", "bf16", "fp16"),
    "offload": ("none", "optimizer", "parameters"),
    "compile": (False,),
    "comm.compression": ("none",),
    "comm.local_steps": (1,),
    "comm.reshard": ("auto", "always"),
    "comm.prefetch": (1,),
}


def deepspeed_config(plan: Plan, train: TrainSection, *, pin_memory: bool = False) -> dict[str, Any]:
    """Return the DeepSpeed configuration for this plan. `pin_memory` is for offloading from a GPU.

    The optimizer is torch's AdamW, the same kernel as without DeepSpeed, so nothing is compiled at the start. Its
    groups come with the parameters. Gradients are accumulated and reduced in fp32 in every precision.
    """
    check_deepspeed(plan, train)
    constants, to_cpu = train.optimizer, {"device": "cpu", "pin_memory": pin_memory}
    elements = plan.comm.bucket_mb * 2**20 // 4
    zero = {
        "stage": STAGES[plan.sharding],
        "reduce_bucket_size": elements,
        "allgather_bucket_size": elements,
        **({"stage3_param_persistence_threshold": PERSISTENT_ELEMENTS} if plan.sharding == "parameters" else {}),
        **({"offload_optimizer": to_cpu} if plan.offload in ("optimizer", "parameters") else {}),
        **({"offload_param": to_cpu} if plan.offload == "parameters" else {}),
    }
    precision: dict[str, Any] = {}
    if plan.precision in ("bf16", "fp16"):
        precision = {"data_types": {"grad_accum_dtype": "fp32"}}
        precision[plan.precision] = {"enabled": True, **(LOSS_SCALE if plan.precision == "fp16" else {})}
    return {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.grad_accum,
        "gradient_clipping": train.clip_norm,
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": train.lr,
                "betas": [constants.beta1, constants.beta2],
                "eps": constants.eps,
                "weight_decay": constants.weight_decay,
                "torch_adam": True,
                "fused": True,
            },
        },
        **precision,
    }


def check_deepspeed(plan: Plan, train: TrainSection) -> None:
    """Raise if DeepSpeed is to run the plan, and does not support all of it or of the recipe."""
    if plan.engine != "deepspeed":
        return
    for field, values in SUPPORTED_VALUES.items():
        if (value := attrgetter(field)(plan)) not in values:
            raise _refusal(f"{field} {value}", f"plan.{field}", f"set plan.{field} to {' or '.join(map(str, values))}")
    unsharded, mesh = plan.sharding == "none", plan.mesh
    if unsharded and plan.precision != "fp32":
        raise _refusal(f"{plan.precision} without sharding", "plan.sharding", "set plan.sharding to optimizer")
    if unsharded and mesh.dp_shard > 1:
        raise _refusal("dp_shard above 1 without sharding", "plan.mesh.dp_shard", "use plan.mesh.dp_replicate")
    if not unsharded and mesh.dp_replicate > 1:
        raise _refusal("replicas of shards", "plan.mesh.dp_replicate", f"set plan.mesh to {{dp_shard: {mesh.dp}}}")
    if unsharded and plan.offload == "optimizer":
        raise _refusal("offload optimizer without sharding", "plan.offload", "set plan.sharding to optimizer")
    if plan.offload == "parameters" and plan.sharding != "parameters":
        raise _refusal(f"offload parameters with sharding {plan.sharding}", "plan.offload",
                       "set plan.sharding to parameters, or plan.offload to optimizer")  # fmt: skip
    if train.optimizer.states != "fp32":
        raise _refusal(f"moments in {train.optimizer.states}", "train.optimizer.states", "set it to fp32")
    if "fp16" in train.precision.values():  # they would have no loss scale
        raise _refusal("single modules in fp16", "train.precision", "set them to bf16")
    if train.precision and plan.precision != "fp32":
        raise _refusal(f"single modules in another precision than {plan.precision}", "train.precision",
                       "leave it out, set plan.precision to fp32")  # fmt: skip


def _refusal(what: str, where: str, fix: str) -> UserError:
    return UserError("P039.deepspeed-not-support", where=where, text=what, way=fix)
