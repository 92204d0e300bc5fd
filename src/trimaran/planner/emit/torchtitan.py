"""torchtitan's TOML. Field names are those of release 0.2.2, `torchtitan/config/job_config.py`."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from trimaran.core import Plan, TrainSection
from trimaran.models import ModelSpec, decoder_of, stage_ranges
from trimaran.planner.emit.emission import (
    Emission,
    Takes,
    absolute_path,
    headline,
    refusal,
    refuse_cpu,
    refuse_settings,
    refuse_unless,
    torchrun,
    unknown_model,
)
from trimaran.planner.emit.peft import refuse_adapter
from trimaran.planner.emit.torchtitan_model import FLAVORS, flavor_of, is_llama, own_flavor, refuse_network
from trimaran.planner.question import Question

TOOL = "torchtitan"
FILE, MODULE = "torchtitan.toml", "trimaran_model"
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zero-bubble": "ZBVZeroBubble"}
TAKES = {
    "engine": Takes(("torch",), "it has an engine of its own"),
    "sharding": Takes(("none", "gradients", "parameters"), "FSDP2 always shards gradients"),
    "precision": Takes(("fp32", "bf16", "fp8"), "it has no loss scaling"),
    "offload": Takes(("none", "parameters"), "it only offloads parameters with their states"),
    "comm.reshard": Takes(
        ("auto", "always", "never"), "its fsdp_reshard_after_forward does not take a number of ranks"
    ),
}


def emit_torchtitan(plan: Plan, question: Question) -> Emission:
    """Return torchtitan's job as TOML, with a module for a model that it has no flavor of."""
    spec, cluster, recipe = decoder_of(question.spec), question.cluster, question.recipe
    refuse_cpu(TOOL, cluster)
    refuse_adapter(TOOL, question)
    refuse_settings(TOOL, recipe.train)
    if spec is None:
        raise unknown_model(TOOL, question.outline.name if question.outline else "this model",
                            "it is not a decoder like Llama or Qwen 3")  # fmt: skip
    refuse_network(TOOL, spec)
    refuse_plan(plan)
    if plan.mesh.pp > 1 and not is_llama(spec):
        raise refusal(TOOL, f"pp {plan.mesh.pp} for {spec.name}", "its Qwen 3 has no pipeline parallelism",
                      where="plan.mesh.pp", fix="set it to 1")  # fmt: skip
    if spec.vocab % plan.mesh.tp:
        raise refusal(TOOL, f"tp {plan.mesh.tp} for a vocabulary of {spec.vocab:,}", "it needs equal parts of it",
                      where="plan.mesh.tp", fix="use a tp that divides the vocabulary")  # fmt: skip
    known = flavor_of(spec)
    name, flavor = FLAVORS[known] if known else (MODULE, spec.name)
    assets = str(absolute_path(recipe.model.path)) if recipe.model.path else f"./assets/hf/{spec.name}"
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
    """Raise for plans that torchtitan cannot run, whatever the model."""
    refuse_unless(TOOL, plan, TAKES)
    mesh, is_unsharded = plan.mesh, plan.sharding == "none"
    fix = "set it to parameters"
    if is_unsharded and mesh.cp > 1:
        raise refusal(TOOL, "full replicas with cp", "with cp it shards over those ranks",
                      where="plan.sharding", fix=fix)  # fmt: skip
    if is_unsharded and mesh.dp > 1 and mesh.tp * mesh.pp * mesh.ep > 1:
        raise refusal(TOOL, "full replicas with another axis", "its DDP supports no other axis", where="plan.sharding",
                      fix=fix)  # fmt: skip
    if is_unsharded and plan.precision != "fp32" and mesh.tp * mesh.pp > 1:
        raise refusal(TOOL, f"{plan.precision} with tp or pp and without shards", "only FSDP2 casts there",
                      where="plan.precision", fix="set it to fp32, or shard parameters")  # fmt: skip
    if not is_unsharded and mesh.shards == 1:
        raise refusal(TOOL, "shards on a single rank", "FSDP2 needs ranks to shard over",
                      where="plan.sharding", fix="set plan.mesh.dp_shard above 1")  # fmt: skip
    if mesh.cp > 1 and plan.comm.context == "exchange":
        raise refusal(TOOL, "cp that exchanges heads", "its context parallelism gathers keys",
                      where="plan.comm.context", fix="set it to gather")  # fmt: skip
    if mesh.shards % mesh.ep:
        raise refusal(TOOL, f"ep {mesh.ep} over replicas", "its experts are spread over the sharded ranks",
                      where="plan.mesh.ep", fix="use dp_shard in place of dp_replicate")  # fmt: skip


def job(plan: Plan, question: Question, spec: ModelSpec) -> dict[str, dict[str, Any]]:
    """Return the sections of the job except the model's. Head and router stay in bf16 under fp8."""
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
    """Return the model's section. In fp8 each tensor has one scale, recomputed in every step."""
    fp8 = {"converters": ["quantize.linear.float8"]} if plan.precision == "fp8" else {}
    return {"name": name, "flavor": flavor, "hf_assets_path": assets, **fp8}


def training(plan: Plan, question: Question) -> dict[str, Any]:
    """Return the batch. A pipeline splits a rank's batch into micro-batches; otherwise they are accumulated."""
    train, rounds = question.recipe.train, plan.grad_accum if plan.mesh.pp > 1 else 1
    return {
        "local_batch_size": plan.micro_batch * rounds,
        "global_batch_size": plan.global_batch,
        "seq_len": question.recipe.data.seq_len,
        "steps": train.steps,
        "max_norm": train.clip_norm or 1e30,  # 0 would zero every gradient
        "enable_cpu_offload": plan.offload == "parameters",
        "mixed_precision_param": "float32" if plan.precision == "fp32" else "bfloat16",
        "mixed_precision_reduce": "float32",
    }


def degrees(plan: Plan) -> dict[str, Any]:
    """Return the degrees of all axes. Experts are split by tp like everything else."""
    mesh, reshard = plan.mesh, str(plan.comm.reshard)
    auto = "never" if plan.sharding == "gradients" else "default"
    fields: dict[str, Any] = {
        "data_parallel_replicate_degree": mesh.dp_replicate,
        "data_parallel_shard_degree": mesh.dp_shard,
        "fsdp_reshard_after_forward": auto if reshard == "auto" else reshard,
        "tensor_parallel_degree": mesh.tp,
        "pipeline_parallel_degree": mesh.pp,
        "context_parallel_degree": mesh.cp,
        "context_parallel_rotate_method": "alltoall" if plan.comm.context == "ring" else "allgather",
        "expert_parallel_degree": mesh.ep,
    }
    return fields | ({"expert_tensor_parallel_degree": mesh.tp} if mesh.ep > 1 else {})


def stages(plan: Plan, spec: ModelSpec, seq_len: int) -> dict[str, Any]:
    """Return the schedule, and the module names of each stage."""
    parts = [[f"layers.{layer}" for layer in each] for each in stage_ranges(spec, plan, seq_len=seq_len)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return {
        "pipeline_parallel_schedule": SCHEDULES[plan.pipeline.schedule],
        "pipeline_parallel_microbatch_size": plan.micro_batch,
        "module_fqns_per_model_part": parts,
    }


def recompute(plan: Plan) -> dict[str, Any]:
    """Return what is recomputed. Selective recompute saves every second matmul, as ours does."""
    match plan.recompute:
        case int() as stride:
            return {"mode": "selective", "selective_ac_option": str(stride)}
        case "selective":
            return {"mode": "selective", "selective_ac_option": "op"}
        case "elementwise":
            raise refusal(TOOL, "recompute elementwise", "it saves at most every second matmul",
                          where="plan.recompute", fix="set it to selective or none")  # fmt: skip
        case mode:
            return {"mode": mode}


def schedule(train: TrainSection) -> dict[str, Any]:
    """Return the learning-rate schedule."""
    wanted = train.schedule
    fields: dict[str, Any] = {"warmup_steps": wanted.warmup_steps, "min_lr_factor": wanted.floor}
    match wanted.kind:
        case "cosine" | "linear":
            return fields | {"decay_type": wanted.kind}
        case "wsd":
            decay_steps = wanted.decay_steps or max(1, train.steps // 5)
            return fields | {"decay_type": "linear", "decay_ratio": min(1.0, decay_steps / train.steps)}
        case _:
            return fields | {"decay_ratio": 0.0}


def notes(plan: Plan, spec: ModelSpec) -> Iterator[str]:
    """Yield what torchtitan decides itself."""
    yield "set training.dataset, and model.hf_assets_path to a folder with the tokenizer"
    if plan.sharding == "none" and plan.mesh.dp > 1:
        yield "DDP's buckets have 100 MB"
    if isinstance(plan.recompute, int):
        yield f"of every {plan.recompute} blocks it recomputes the last, not the first"
    if spec.block.experts:
        yield "experts are balanced by a router bias, not by a loss"
    if plan.comm.prefetch > 1:
        yield "weights are gathered one block ahead"
    if plan.comm.regather and plan.mesh.tp > 1:
        yield "it saves gathered inputs whole, which needs more memory"


def toml(tree: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the sections as TOML. Strings, numbers, booleans and lists have the same syntax in JSON."""
    parts = [f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in section.items())
             for name, section in tree.items()]  # fmt: skip
    return "\n".join(parts)
