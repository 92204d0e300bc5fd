"""torchtitan's TOML. The names are those of its release 0.2.2, `torchtitan/config/job_config.py`."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from trimaran.core import Plan, TrainSection
from trimaran.models import ModelSpec, stage_ranges
from trimaran.planner.emit.emission import (
    Emission,
    Takes,
    headline,
    refusal,
    refuse_cpu,
    refuse_settings,
    refuse_unless,
    torchrun,
    unknown_model,
    whole_path,
)
from trimaran.planner.emit.torchtitan_model import FLAVORS, flavor_of, own_flavor, pipelines, refuse_network
from trimaran.planner.question import Question

TOOL = "torchtitan"
FILE, MODULE = "torchtitan.toml", "trimaran_model"
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zero-bubble": "ZBVZeroBubble"}
TAKES = {
    "engine": Takes(("torch",), "it has no DeepSpeed"),
    "sharding": Takes(("none", "gradients", "parameters"), "FSDP2 shards gradients whenever it shards"),
    "precision": Takes(("fp32", "bf16", "fp8"), "it scales no loss"),
    "offload": Takes(("none", "parameters"), "it offloads parameters with all that belongs to them"),
    "comm.reshard": Takes(("auto", "always", "never"), "its fsdp_reshard_after_forward has no number of ranks"),
}


def emit_torchtitan(plan: Plan, question: Question) -> Emission:
    """Return torchtitan's job as TOML, with a module for a network that it has no flavor of."""
    spec, cluster, recipe = question.spec, question.cluster, question.recipe
    refuse_cpu(TOOL, cluster)
    refuse_settings(TOOL, recipe.train)
    if not isinstance(spec, ModelSpec):
        raise unknown_model(TOOL, question.outline.name if question.outline else "this model",
                            "it is not a decoder like Llama or Qwen 3")  # fmt: skip
    refuse_network(TOOL, spec)
    refuse_plan(plan)
    if plan.mesh.pp > 1 and not pipelines(spec):
        raise refusal(TOOL, f"pp {plan.mesh.pp} for {spec.name}", "its Qwen 3 is not cut into stages",
                      where="plan.mesh.pp", fix="set it to 1")  # fmt: skip
    known = flavor_of(spec)
    name, flavor = FLAVORS[known] if known else (MODULE, spec.name)
    assets = str(whole_path(recipe.model.path)) if recipe.model.path else f"./assets/hf/{spec.name}"
    tree = {
        "model": model(plan, name, flavor, assets),
        **job(plan, question, spec),
    }
    if not known:
        tree["experimental"] = {"custom_import": MODULE}
    files = {FILE: headline(TOOL, plan, question) + toml(tree)}
    files |= {} if known else {f"{MODULE}.py": own_flavor(MODULE, spec)}
    command = torchrun(cluster, "-m", "torchtitan.train", "--job.config_file", FILE)
    return Emission(files=files, command=command, notes=tuple(notes(plan, spec)))


def refuse_plan(plan: Plan) -> None:
    """Raise for what torchtitan cannot do, whatever the network."""
    refuse_unless(TOOL, plan, TAKES)
    mesh, whole = plan.mesh, plan.sharding == "none"
    fix = "set it to parameters"
    if whole and mesh.cp > 1:
        raise refusal(TOOL, "whole replicas of the parts of a sequence", "with cp it shards over them",
                      where="plan.sharding", fix=fix)  # fmt: skip
    if whole and mesh.dp > 1 and mesh.tp * mesh.pp * mesh.ep > 1:
        raise refusal(TOOL, "whole replicas beside another axis", "its DDP goes with no other", where="plan.sharding",
                      fix=fix)  # fmt: skip
    if whole and plan.precision != "fp32" and mesh.tp * mesh.pp > 1:
        raise refusal(TOOL, f"{plan.precision} with tp or pp and without shards", "FSDP2 is what casts there",
                      where="plan.precision", fix="set it to fp32, or shard parameters")  # fmt: skip
    if not whole and mesh.shards == 1:
        raise refusal(TOOL, "shards on a single rank", "FSDP2 is switched on by ranks to shard over",
                      where="plan.sharding", fix="set plan.mesh.dp_shard above 1")  # fmt: skip
    if mesh.cp > 1 and plan.comm.context == "exchange":
        raise refusal(TOOL, "cp that exchanges heads", "its context parallelism passes keys on",
                      where="plan.comm.context", fix="set it to gather")  # fmt: skip
    if mesh.shards % mesh.ep:
        raise refusal(TOOL, f"ep {mesh.ep} over replicas", "its experts lie on the ranks that shard",
                      where="plan.mesh.ep", fix="use dp_shard in place of dp_replicate")  # fmt: skip


def job(plan: Plan, question: Question, spec: ModelSpec) -> dict[str, dict[str, Any]]:
    """Return the sections of the job but the model's. Head and router multiply in bf16 where the rest does in fp8."""
    recipe, constants = question.recipe, question.recipe.train.optimizer
    fp8 = {"quantize.linear.float8": {"filter_fqns": ["output", "router.gate"]}} if plan.precision == "fp8" else {}
    return {
        "job": {"description": recipe.name, "dump_folder": f"./outputs/{recipe.name}"},
        "training": training(plan, question),
        "parallelism": degrees(plan) | (stages(plan, spec, recipe.data.seq_len) if plan.mesh.pp > 1 else {}),
        "activation_checkpoint": recompute(plan),
        "compile": {"enable": plan.compile, "components": ["model", "loss"]},
        "optimizer": {
            "name": "AdamW",
            "lr": recipe.train.lr,
            "beta1": constants.beta1,
            "beta2": constants.beta2,
            "eps": constants.eps,
            "weight_decay": constants.weight_decay,
        },
        "lr_scheduler": schedule(recipe.train),
        "debug": {"seed": recipe.train.seed, "deterministic": recipe.train.deterministic},
        **fp8,
    }


def model(plan: Plan, name: str, flavor: str, assets: str) -> dict[str, Any]:
    """Return the section of the network. In fp8 each tensor has one scale, found anew in every step."""
    fp8 = {"converters": ["quantize.linear.float8"]} if plan.precision == "fp8" else {}
    return {"name": name, "flavor": flavor, "hf_assets_path": assets, **fp8}


def training(plan: Plan, question: Question) -> dict[str, Any]:
    """Return the batch. A pipeline cuts a rank's batch into micro-batches; without one they are accumulated."""
    train, rounds = question.recipe.train, plan.grad_accum if plan.mesh.pp > 1 else 1
    return {
        "local_batch_size": plan.micro_batch * rounds,
        "global_batch_size": plan.global_batch,
        "seq_len": question.recipe.data.seq_len,
        "steps": train.steps,
        "max_norm": train.clip_norm or 1e30,  # 0 would make every gradient 0
        "enable_cpu_offload": plan.offload == "parameters",
        "mixed_precision_param": "float32" if plan.precision == "fp32" else "bfloat16",
        "mixed_precision_reduce": "float32",
    }


def degrees(plan: Plan) -> dict[str, Any]:
    """Return the degrees of all axes. The features of experts are sliced as those of everything else."""
    mesh, reshard = plan.mesh, str(plan.comm.reshard)
    auto = "never" if plan.sharding == "gradients" else "default"
    fields: dict[str, Any] = {
        "data_parallel_replicate_degree": mesh.dp_replicate,
        "data_parallel_shard_degree": mesh.dp_shard,
        "fsdp_reshard_after_forward": auto if reshard == "auto" else reshard,
        "tensor_parallel_degree": mesh.tp,
        "pipeline_parallel_degree": mesh.pp,
        "context_parallel_degree": mesh.cp,
        "context_parallel_rotate_method": "allgather",
        "expert_parallel_degree": mesh.ep,
    }
    return fields | ({"expert_tensor_parallel_degree": mesh.tp} if mesh.ep > 1 else {})


def stages(plan: Plan, spec: ModelSpec, seq_len: int) -> dict[str, Any]:
    """Return the schedule, and the modules of each stage by name."""
    parts = [[f"layers.{layer}" for layer in each] for each in stage_ranges(spec, plan, seq_len=seq_len)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return {
        "pipeline_parallel_schedule": SCHEDULES[plan.pipeline.schedule],
        "pipeline_parallel_microbatch_size": plan.micro_batch,
        "module_fqns_per_model_part": parts,
    }


def recompute(plan: Plan) -> dict[str, Any]:
    """Return what is computed again. Theirs and ours keep every second product when it is selective."""
    match plan.recompute:
        case int() as stride:
            return {"mode": "selective", "selective_ac_option": str(stride)}
        case "selective":
            return {"mode": "selective", "selective_ac_option": "op"}
        case mode:
            return {"mode": mode}


def schedule(train: TrainSection) -> dict[str, Any]:
    """Return the learning rate's way down."""
    wish = train.schedule
    fields: dict[str, Any] = {"warmup_steps": wish.warmup_steps, "min_lr_factor": wish.floor}
    match wish.kind:
        case "cosine" | "linear":
            return fields | {"decay_type": wish.kind}
        case "wsd":
            slope = wish.decay_steps or max(1, train.steps // 5)
            return fields | {"decay_type": "linear", "decay_ratio": min(1.0, slope / train.steps)}
        case _:
            return fields | {"decay_ratio": 0.0}


def notes(plan: Plan, spec: ModelSpec) -> Iterator[str]:
    """Yield what torchtitan decides itself."""
    yield "set training.dataset, and model.hf_assets_path to a folder with the tokenizer"
    if plan.sharding == "none" and plan.mesh.dp > 1:
        yield "DDP's buckets are of 100 MB"
    if isinstance(plan.recompute, int):
        yield f"of every {plan.recompute} blocks it computes the last again, not the first"
    if spec.block.experts:
        yield "experts are balanced by a bias of the router, not by a loss"
    if plan.comm.prefetch > 1:
        yield "weights are gathered one block ahead"


def toml(tree: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the sections as TOML. Strings, numbers, booleans and lists read the same in JSON."""
    parts = [f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in section.items())
             for name, section in tree.items()]  # fmt: skip
    return "\n".join(parts)
