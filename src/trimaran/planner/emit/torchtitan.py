"""torchtitan's TOML, and a module for a model that it has no flavor of.

Field names are those of release 0.2.2, `torchtitan/config/job_config.py`.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trimaran.core import Plan, TrainSection
from trimaran.models import PRESETS, ModelSpec, decoder_of, stage_ranges, variations
from trimaran.planner.emit.emission import (
    Emission,
    Takes,
    absolute_path,
    headline,
    refusal,
    refuse_adapter,
    refuse_cpu,
    refuse_settings,
    refuse_unless,
    torchrun,
    unknown_model,
)
from trimaran.planner.question import Question

# Its flavors that equal one of our presets in every field (torchtitan 0.2.2, models/{llama3,qwen3}/__init__.py).
FLAVORS = {
    "llama-3.1-8b": ("llama3", "8B"),
    "llama-3.1-70b": ("llama3", "70B"),
    "llama-3.1-405b": ("llama3", "405B"),
    "qwen3-0.6b": ("qwen3", "0.6B"),
    "qwen3-1.7b": ("qwen3", "1.7B"),
    "qwen3-4b": ("qwen3", "4B"),
    "qwen3-8b": ("qwen3", "8B"),
    "qwen3-14b": ("qwen3", "14B"),
    "qwen3-32b": ("qwen3", "32B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
}
LLAMA = '''"""{name}: torchtitan's Llama 3 in another shape."""

from dataclasses import replace

from torchtitan.models.llama3 import get_train_spec
from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
from torchtitan.protocols.train_spec import register_train_spec

shape = TransformerModelArgs(
    dim={dim},
    n_layers={layers},
    n_heads={heads},
    n_kv_heads={kv_heads},
    vocab_size={vocab},
    multiple_of={ffn},  # half of the feed-forward, rounded up to a multiple of all of it
    ffn_dim_multiplier={half!r},
    norm_eps={eps!r},
    rope_theta={theta!r},
    rope_scaling_args=RoPEScalingArgs({factor!r}, {low!r}, {high!r}, {original}),
)
register_train_spec("{module}", replace(get_train_spec(), model_args={{"{name}": shape}}))
'''
QWEN = '''"""{name}: torchtitan's Qwen 3 in another shape."""

from dataclasses import replace

from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3 import get_train_spec
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.protocols.train_spec import register_train_spec

shape = Qwen3ModelArgs(
    dim={dim},
    n_layers={layers},
    n_heads={heads},
    n_kv_heads={kv_heads},
    head_dim={head_dim},
    hidden_dim={ffn},
    vocab_size={vocab},
    norm_eps={eps!r},
    rope_theta={theta!r},
    qk_norm={qk_norm},
    enable_weight_tying={tied},{experts}
)
register_train_spec("{module}", replace(get_train_spec(), model_args={{"{name}": shape}}))
'''
EXPERTS = """
    moe_enabled=True,
    moe_inter_dim={ffn},
    moe_args=MoEArgs(
        num_experts={num_experts},
        num_shared_experts={shared},
        top_k={top_k},
        score_func="softmax",
        route_norm={normalize},
        score_before_experts=False,
    ),"""


def is_llama(spec: ModelSpec) -> bool:
    """Return whether this is a Llama, the only one of the two with pipeline parallelism."""
    plain = not (spec.tied or spec.block.qk_norm or spec.block.experts)
    return plain and spec.heads * spec.head_dim == spec.hidden


def refuse_network(tool: str, spec: ModelSpec) -> None:
    """Raise for a decoder that is neither of the two."""
    block, experts = spec.block, spec.block.experts
    if beyond := variations(spec):
        raise unknown_model(tool, spec.name, f"it has no {', '.join(beyond)}")
    if block.qkv_bias:
        raise unknown_model(tool, spec.name, "its attention has no biases")
    if not is_llama(spec) and block.rope.factor != 1:
        raise unknown_model(tool, spec.name, "only its Llama 3 scales RoPE, and that one has no tied embedding")
    if experts and (experts.shared_gate or experts.shared_ffn % experts.ffn or experts.capacity):
        raise unknown_model(tool, spec.name, "its experts have no shared gate, no capacity, and one width")


def own_flavor(spec: ModelSpec) -> str:
    """Return the Python module that registers the model under the module's name."""
    block, rope = spec.block, spec.block.rope
    common = {"module": MODULE, "name": spec.name, "dim": spec.hidden, "layers": spec.layers, "heads": spec.heads,
              "kv_heads": spec.kv_heads, "vocab": spec.vocab, "ffn": spec.ffn, "eps": block.norm_eps,
              "theta": rope.theta}  # fmt: skip
    if is_llama(spec):
        half = spec.ffn / 2 / int(8 * spec.hidden / 3)  # of Llama's default width
        return LLAMA.format(**common, half=half, factor=rope.factor, low=rope.low_freq_factor,
                            high=rope.high_freq_factor, original=rope.original_max_seq_len)  # fmt: skip
    text, experts = "", block.experts
    if experts:
        text = EXPERTS.format(ffn=experts.ffn, num_experts=experts.num_experts, top_k=experts.top_k,
                              shared=experts.shared_ffn // experts.ffn, normalize=experts.normalize_top_k)  # fmt: skip
    return QWEN.format(**common, head_dim=spec.head_dim, qk_norm=block.qk_norm, tied=spec.tied, experts=text)


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
    # The preset that equals the spec in all but name and longest sequence, if torchtitan has it.
    shapes = {preset: replace(spec, name=preset, max_seq_len=PRESETS[preset].max_seq_len) for preset in FLAVORS}
    known = next((preset for preset, shape in shapes.items() if shape == PRESETS[preset]), None)
    name, flavor = FLAVORS[known] if known else (MODULE, spec.name)
    assets = str(absolute_path(recipe.model.path)) if recipe.model.path else f"./assets/hf/{spec.name}"
    # In fp8 each tensor has one scale, recomputed in every step.
    fp8 = {"converters": ["quantize.linear.float8"]} if plan.precision == "fp8" else {}
    model = {"name": name, "flavor": flavor, "hf_assets_path": assets, **fp8}
    tree = {"model": model, **job(plan, question, spec)}
    if not known:
        tree["experimental"] = {"custom_import": MODULE}
    # Strings, numbers, booleans and lists have the same syntax in TOML and JSON.
    sections = [f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in section.items())
                for name, section in tree.items()]  # fmt: skip
    files = {FILE: headline(TOOL, plan, question) + "\n".join(sections)}
    files |= {} if known else {f"{MODULE}.py": own_flavor(spec)}
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
    recipe, train, mesh, reshard = question.recipe, question.recipe.train, plan.mesh, str(plan.comm.reshard)
    constants, auto = train.optimizer, "never" if plan.sharding == "gradients" else "default"
    # A pipeline splits a rank's batch into micro-batches; otherwise they are accumulated.
    rounds = plan.grad_accum if mesh.pp > 1 else 1
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": mesh.dp_replicate,
        "data_parallel_shard_degree": mesh.dp_shard,
        "fsdp_reshard_after_forward": auto if reshard == "auto" else reshard,
        "tensor_parallel_degree": mesh.tp,
        "pipeline_parallel_degree": mesh.pp,
        "context_parallel_degree": mesh.cp,
        "context_parallel_rotate_method": "alltoall" if plan.comm.context == "ring" else "allgather",
        "expert_parallel_degree": mesh.ep,
    }
    if mesh.ep > 1:  # experts are split by tp like everything else
        parallelism["expert_tensor_parallel_degree"] = mesh.tp
    if mesh.pp > 1:
        parallelism |= stages(plan, spec, recipe.data.seq_len)
    fp8 = {"quantize.linear.float8": {"filter_fqns": ["output", "router.gate"]}} if plan.precision == "fp8" else {}
    return {
        "job": {"description": recipe.name, "dump_folder": f"./outputs/{recipe.name}"},
        "training": {
            "local_batch_size": plan.micro_batch * rounds,
            "global_batch_size": plan.global_batch,
            "seq_len": recipe.data.seq_len,
            "steps": train.steps,
            "max_norm": train.clip_norm or 1e30,  # 0 would zero every gradient
            "enable_cpu_offload": plan.offload == "parameters",
            "mixed_precision_param": "float32" if plan.precision == "fp32" else "bfloat16",
            "mixed_precision_reduce": "float32",
        },
        "parallelism": parallelism,
        "activation_checkpoint": recompute(plan),
        "compile": {"enable": plan.compile, "components": ["model", "loss"]},
        "optimizer": {
            "name": "AdamW",
            "lr": train.lr,
            "beta1": constants.beta1,
            "beta2": constants.beta2,
            "eps": constants.eps,
            "weight_decay": constants.weight_decay,
        },
        "lr_scheduler": schedule(train),
        "debug": {"seed": train.seed, "deterministic": train.deterministic},
        **fp8,
    }


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
