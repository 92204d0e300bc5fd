"""Hugging Face accelerate's YAML: DDP, FSDP2, DeepSpeed. Field names are those of accelerate 1.15."""

from typing import Any

import yaml

from trimaran.core import Plan
from trimaran.machine import Cluster
from trimaran.planner.emit.deepspeed import full_config, refuse_for_deepspeed
from trimaran.planner.emit.emission import (
    PORT,
    Emission,
    Takes,
    as_json,
    headline,
    peft_files,
    peft_notes,
    refusal,
    refuse_cpu,
    refuse_settings,
    refuse_unless,
)
from trimaran.planner.question import Question

TOOL = "accelerate"
FILE, DEEPSPEED_FILE = "accelerate.yaml", "ds_config.json"
MIXED_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
TAKES = {
    "mesh.pp": Takes((1,), "it has no pipeline for training"),
    "mesh.ep": Takes((1,), "only the model's own code can spread experts"),
    "recompute": Takes(("none", "full"), "it recomputes all blocks or none"),
    "comm.reshard": Takes(("auto", "always", "never"), "its reshard_after_forward is a boolean"),
    "sharding": Takes(("none", "gradients", "parameters"), "FSDP2 always shards gradients"),
}


def emit_accelerate(plan: Plan, question: Question) -> Emission:
    """Return the YAML for `accelerate launch`. The script, its optimizer and its data are the user's."""
    cluster, train = question.cluster, question.recipe.train
    refuse_cpu(TOOL, cluster)
    refuse_settings(TOOL, train)
    files: dict[str, str] = {}
    if plan.engine == "deepspeed":
        refuse_for_deepspeed(TOOL, plan, train)
        settings: dict[str, Any] = {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {
                "deepspeed_config_file": DEEPSPEED_FILE,
                "deepspeed_multinode_launcher": "standard",
                "zero3_init_flag": plan.sharding == "parameters",
            },
        }
        config = full_config(plan, question)
        del config["optimizer"]  # the script has one of its own, also with an offloaded one
        if plan.offload != "none":
            config["zero_force_ds_cpu_optimizer"] = False
        files[DEEPSPEED_FILE] = as_json(config)
    else:
        refuse_for_torch(TOOL, plan)
        if plan.mesh.tp > 1 and plan.mesh.dp > 1 and plan.sharding == "none":
            raise refusal(TOOL, "tp with full replicas", "its parallelism_config does not allow that",
                          where="plan.sharding", fix="set it to parameters, or plan.mesh.tp to 1")  # fmt: skip
        kind = "FSDP" if plan.sharding != "none" else "MULTI_GPU" if plan.mesh.world_size > 1 else "NO"
        settings: dict[str, Any] = {"distributed_type": kind, "mixed_precision": MIXED_PRECISION[plan.precision]}
        if plan.precision == "fp8":  # one scale per tensor, recomputed in every step: torchao's default
            settings["fp8_config"] = {"backend": "AO"}
        if kind == "FSDP":
            settings["fsdp_config"] = {
                "fsdp_version": 2,
                "fsdp_reshard_after_forward": reshards(plan),
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_offload_params": plan.offload == "parameters",
                "fsdp_activation_checkpointing": plan.recompute == "full",
                "fsdp_activation_checkpointing_offload": plan.offload == "activations",
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
                "fsdp_cpu_ram_efficient_loading": False,
            }
        if sizes := parallelism(plan):
            settings["parallelism_config"] = {f"parallelism_config_{name}": size for name, size in sizes.items()}
        if plan.compile:
            settings["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        **settings,
        "num_machines": cluster.num_nodes,
        "num_processes": cluster.world_size,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "use_cpu": False,
    }
    files = {FILE: headline(TOOL, plan, question) + yaml.safe_dump(settings, sort_keys=False), **files}
    files |= peft_files(TOOL, question)
    return Emission(files=files, command=launch(plan, cluster), notes=(*notes(plan), *peft_notes(question)))


def refuse_for_torch(tool: str, plan: Plan) -> None:
    """Raise for what accelerate and the Trainer, which builds on it, cannot do without DeepSpeed."""
    shards, mesh = plan.mesh.shards, plan.mesh
    refuse_unless(tool, plan, TAKES)
    if plan.sharding == "none" and mesh.cp > 1:
        raise refusal(tool, "full replicas with cp", "with cp it shards over those ranks", fix="set "
                      "plan.sharding to parameters", where="plan.sharding")  # fmt: skip
    if plan.sharding != "none" and shards == 1:
        raise refusal(tool, "shards on a single rank", "FSDP2 needs ranks to shard over", where="plan.sharding",
                      fix="set plan.mesh.dp_shard above 1, or plan.engine to deepspeed")  # fmt: skip
    if mesh.cp > 1 and plan.comm.context == "exchange":
        raise refusal(tool, "cp that exchanges heads", "torch's context parallelism gathers keys",
                      where="plan.comm.context", fix="set it to gather")  # fmt: skip
    if plan.offload == "optimizer" or (plan.offload == "activations" and tool != TOOL):
        raise refusal(tool, f"offload {plan.offload}", "FSDP2 only offloads parameters with their states",
                      where="plan.offload", fix="set it to parameters, or plan.engine to deepspeed")  # fmt: skip
    if plan.offload == "activations" and (plan.sharding == "none" or plan.recompute != "full"):
        raise refusal(tool, "offload activations here", "it offloads the inputs of blocks that FSDP2 shards and "
                      "recomputes", where="plan.offload", fix="set plan.recompute to full and plan.sharding to "
                      "parameters")  # fmt: skip


def parallelism(plan: Plan) -> dict[str, Any]:
    """Return the fields of accelerate's ParallelismConfig; empty for plain data parallelism."""
    mesh = plan.mesh
    if mesh.tp == mesh.cp == 1 and (plan.sharding == "none" or mesh.dp_replicate == 1):
        return {}
    return {f"{axis}_size": getattr(mesh, axis) for axis in ("dp_replicate", "dp_shard", "tp", "cp")}


def reshards(plan: Plan) -> bool:
    """Return whether a block's gathered weights are freed after its forward."""
    return {"auto": plan.sharding == "parameters", "always": True, "never": False}[str(plan.comm.reshard)]


def launch(plan: Plan, cluster: Cluster) -> str:
    """Return the command. The environment sets an Accelerator's accumulation; DeepSpeed's file sets its own."""
    command = [f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={plan.grad_accum}"] if plan.engine_traits.uses_fsdp else []
    command += ["accelerate", "launch", "--config_file", FILE]
    if cluster.num_nodes > 1:
        command += ["--machine_rank", '"$NODE_RANK"', "--main_process_ip", '"$MASTER_ADDR"']
        command += ["--main_process_port", str(PORT)]
    command += ["train.py", "--per_device_train_batch_size", str(plan.micro_batch)]
    if checkpoints_itself(plan):
        command.append("--gradient_checkpointing")
    return " ".join(command)


def checkpoints_itself(plan: Plan) -> bool:
    """Return whether the model itself recomputes its blocks: where FSDP2 does not wrap them."""
    return plan.recompute == "full" and (plan.sharding == "none" or not plan.engine_traits.uses_fsdp)


def notes(plan: Plan) -> list[str]:
    """Return what the configuration leaves to the script, and where accelerate behaves differently."""
    notes = ["train.py is your script; it passes --per_device_train_batch_size to its loader, and defines the "
             "optimizer, the learning rate, the clipping and the data"]  # fmt: skip
    if checkpoints_itself(plan):
        notes.append("--gradient_checkpointing asks your script for model.gradient_checkpointing_enable()")
    if not plan.engine_traits.uses_fsdp:
        return notes
    if plan.mesh.tp > 1:
        notes.append("your script loads the model with distributed_config=DistributedConfig("
                    f"tp_size={plan.mesh.tp}), which splits the weights")  # fmt: skip
    if plan.sharding != "none" and plan.grad_accum > 1:
        notes.append("gradients stay unsharded between micro-batches unless your script passes "
                    "GradientAccumulationPlugin(sync_each_batch=True)")  # fmt: skip
    return notes + fsdp_notes(plan)


def fsdp_notes(plan: Plan) -> list[str]:
    """Return what accelerate does differently whenever it shards."""
    if plan.sharding == "none":
        return []
    notes = ["blocks are those that the model lists in _no_split_modules"]
    if plan.precision in ("bf16", "fp16"):
        notes.append(f"gradients are reduced in {plan.precision}, not in fp32")
    if plan.comm.prefetch > 1:
        notes.append("weights are gathered one block ahead")
    return notes
