"""Questions for emitters, and the plan facts that can be read from an emission alone."""

import json
import re
import shlex
import tomllib
from typing import Any

import yaml

from trimaran.core import Mesh, Plan, Recipe
from trimaran.machine import parse_cluster
from trimaran.models import PRESETS, outline_of
from trimaran.planner import Emission, Question

STAGES = ("none", "optimizer", "gradients", "parameters")
Facts = dict[str, Any]


def question(preset: str, cluster: str, plan: Plan, **train: Any) -> Question:
    """Return the question for a preset, with sequences of 2048 positions and the plan's own batch."""
    spec = PRESETS[preset]
    asked = {
        "model": {"preset": preset},
        "data": {"seq_len": 2048},
        "train": {"global_batch": plan.global_batch, **train},
        "cluster": cluster,
    }
    recipe = Recipe.model_validate(asked)
    return Question(recipe=recipe, spec=spec, outline=outline_of(spec), cluster=parse_cluster(cluster))


def expected(plan: Plan) -> Facts:
    """Return the facts that every emission of `plan` must contain. FSDP2's stages differ only in resharding."""
    sharding = plan.sharding
    if plan.engine == "torch" and sharding in ("gradients", "parameters") and plan.comm.reshard != "auto":
        sharding = "parameters" if plan.comm.reshard == "always" else "gradients"
    return {
        "mesh": plan.mesh,
        "batch": (plan.micro_batch, plan.grad_accum, plan.global_batch),
        "precision": plan.precision,
        "sharding": sharding,
    }


def command_options(command: str) -> dict[str, str]:
    """Return the options of a command line with their values; a flag has an empty one."""
    parts = shlex.split(command)
    values = [*parts[1:], "--"]
    return {part: "" if after.startswith("--") else after for part, after in zip(parts, values, strict=True)}


def started(command: str) -> int:
    """Return how many processes torchrun or deepspeed start in total."""
    options = command_options(command)
    each = options.get("--nproc-per-node") or options["--num_gpus"]
    return int(each) * int(options.get("--nnodes") or options.get("--num_nodes") or 1)


def of_zero(text: str, world_size: int) -> Facts:
    config = json.loads(text)
    stage = config["zero_optimization"]["stage"]
    precision = next((each for each in ("bf16", "fp16") if config.get(each, {}).get("enabled")), "fp32")
    mesh = Mesh(dp_shard=world_size) if stage else Mesh(dp_replicate=world_size)
    batch = (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"])
    return {
        "mesh": mesh,
        "batch": (*batch, config["train_batch_size"]),
        "precision": precision,
        "sharding": STAGES[stage],
    }


def of_sizes(sizes: dict[str, int], world_size: int, *, sharded: bool) -> Mesh:
    if not sizes:
        return Mesh(dp_shard=world_size) if sharded else Mesh(dp_replicate=world_size)
    mesh = Mesh.model_validate({name.removesuffix("_size"): size for name, size in sizes.items()})
    assert mesh.world_size == world_size
    return mesh


def of_accelerate(emission: Emission) -> Facts:
    config = yaml.safe_load(emission.files["accelerate.yaml"])
    world_size = config["num_processes"]
    if config["distributed_type"] == "DEEPSPEED":
        return of_zero(emission.files["ds_config.json"], world_size)
    fsdp = config.get("fsdp_config")
    sizes = {name[19:]: size for name, size in config.get("parallelism_config", {}).items()}
    mesh = of_sizes(sizes, world_size, sharded=fsdp is not None)
    micro_batch = int(command_options(emission.command)["--per_device_train_batch_size"])
    (accumulation,) = re.findall(r"^ACCELERATE_GRADIENT_ACCUMULATION_STEPS=(\d+) ", emission.command)
    sharding = "none" if fsdp is None else STAGES[2 + fsdp["fsdp_reshard_after_forward"]]
    return {
        "mesh": mesh,
        "batch": (micro_batch, int(accumulation), micro_batch * int(accumulation) * mesh.dp),
        "precision": {"no": "fp32"}.get(config["mixed_precision"], config["mixed_precision"]),
        "sharding": sharding,
    }


def of_deepspeed(emission: Emission) -> Facts:
    return of_zero(emission.files["ds_config.json"], started(emission.command))


def of_hf_trainer(emission: Emission) -> Facts:
    fields, world_size = json.loads(emission.files["training_args.json"]), started(emission.command)
    batch = fields["per_device_train_batch_size"], fields["gradient_accumulation_steps"]
    if "deepspeed" in fields:
        facts = of_zero(emission.files[fields["deepspeed"]], world_size)
        assert facts["batch"][:2] == batch
        return facts
    mesh = of_sizes(fields.get("parallelism_config", {}), world_size, sharded="fsdp" in fields)
    return {
        "mesh": mesh,
        "batch": (*batch, batch[0] * batch[1] * mesh.dp),
        "precision": next((each for each in ("bf16", "fp16") if fields[each]), "fp32"),
        "sharding": STAGES[2 + fields["fsdp_config"]["reshard_after_forward"]] if "fsdp" in fields else "none",
    }


def of_torchtitan(emission: Emission) -> Facts:
    job = tomllib.loads(emission.files["torchtitan.toml"])
    ranks, training = job["parallelism"], job["training"]
    names = {"data_parallel_replicate": "dp_replicate", "data_parallel_shard": "dp_shard", "tensor_parallel": "tp",
             "pipeline_parallel": "pp", "context_parallel": "cp", "expert_parallel": "ep"}  # fmt: skip
    mesh = Mesh.model_validate({axis: ranks[f"{name}_degree"] for name, axis in names.items()})
    assert mesh.world_size == started(emission.command)
    micro_batch = ranks.get("pipeline_parallel_microbatch_size", training["local_batch_size"])
    rounds = training["global_batch_size"] // (training["local_batch_size"] * mesh.dp)
    frees = {"default": True, "always": True, "never": False}[ranks["fsdp_reshard_after_forward"]]
    precision = {"bfloat16": "bf16", "float32": "fp32"}[training["mixed_precision_param"]]
    return {
        "mesh": mesh,
        "batch": (micro_batch, rounds * training["local_batch_size"] // micro_batch, training["global_batch_size"]),
        "precision": "fp8" if job["model"].get("converters") else precision,
        "sharding": STAGES[2 + frees] if mesh.shards > 1 else "none",
    }


def of_megatron(emission: Emission) -> Facts:
    command = emission.files["pretrain.sh"].split("set -eu\n")[1]
    options, sharded = command_options(command), "--use-distributed-optimizer" in command
    names = {"tp": "tensor-model-parallel", "pp": "pipeline-model-parallel", "cp": "context-parallel",
             "ep": "expert-model-parallel"}  # fmt: skip
    inner = {axis: int(options.get(f"--{name}-size", 1)) for axis, name in names.items()}
    data = started(command) // (inner["tp"] * inner["pp"] * inner["cp"])
    replicas = int(options.get("--num-distributed-optimizer-instances", 1)) if sharded else data
    micro_batch, global_batch = int(options["--micro-batch-size"]), int(options["--global-batch-size"])
    reduced = next((each for each in ("bf16", "fp16") if f"--{each}" in options), "fp32")
    return {
        "mesh": Mesh(dp_replicate=replicas, dp_shard=data // replicas, **inner),
        "batch": (micro_batch, global_batch // micro_batch // data, global_batch),
        "precision": "fp8" if "--fp8-format" in options else reduced,
        "sharding": "optimizer" if sharded else "none",
    }


READERS = {
    "accelerate": of_accelerate,
    "deepspeed": of_deepspeed,
    "hf-trainer": of_hf_trainer,
    "torchtitan": of_torchtitan,
    "megatron": of_megatron,
}
