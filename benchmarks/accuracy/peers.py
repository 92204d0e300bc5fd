"""Predictions of other estimators for the same runs. Each is optional: without its package it predicts nothing.

llm-analysis, accelerate and DeepSpeed are called. The cookbook is a script without a package, so its formula is
repeated from EleutherAI/cookbook@069ae2e, `calc/calc_transformer_mem.py`.
"""

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from benchmarks.accuracy.errors import Case
from benchmarks.accuracy.published import Run

from trimaran.machine import find_device
from trimaran.planner.predict_request import job_of

STAGE = {"none": 0, "optimizer": 1, "gradients": 2, "parameters": 3}
LLM_ANALYSIS_GPUS = {"H100": "h100-sxm-80gb", "A100-80GB": "a100-sxm-80gb", "A100-40GB": "a100-sxm-40gb"}
LLM_ANALYSIS_GPUS |= {"H200": "h100-sxm-80gb", "A800-80GB": "a100-sxm-80gb"}


class Answer(NamedTuple):
    """Bytes of one GPU and its tokens per second; None if the estimator does not predict them."""

    peak_bytes: float | None = None
    tokens_per_second_per_gpu: float | None = None
    refused: bool = False


def cookbook(run: Run) -> Answer:
    """Return the cookbook's bytes, with checkpointing wherever something is recomputed or not saved by flash attention.

    It has its own parameter count, 4 bytes of gradients that no axis divides, 12 of AdamW over all GPUs, activations of
    a GPT block, and DeepSpeed's buckets.
    """
    model, plan, gpus = run.line["model"], run.line["plan"], run.gpus
    if "experts" in model:
        return Answer()
    hidden, layers, length = model["hidden"], model["layers"], model["seq_len"]
    stage, mesh = STAGE[plan.get("sharding", "none")], plan.get("mesh", {})
    shared = (model.get("kv_heads") or model["heads"]) / model["heads"]
    ffn = (3 if model["gated"] else 2) * hidden * model["ffn"]
    parameters = 2 * model["vocab"] * hidden + hidden * length + (8 * layers + 2) * hidden
    parameters += layers * (2 * (1 + shared) * hidden**2 + ffn)
    weights = 2 * parameters / (mesh.get("tp", 1) * mesh.get("pp", 1)) / (gpus if stage == 3 else 1)
    gradients = 4 * parameters / (gpus if stage >= 2 else 1)
    moments = 12 * parameters / (gpus if stage >= 1 else 1)
    buckets = 0.0 if gpus == 1 or stage == 0 else 2 * (5e8 + (1e9 if stage == 3 else 0))
    activations = 34 * length * plan["micro_batch"] * hidden * layers
    return Answer(weights + gradients + moments + buckets + activations)


def accelerate(run: Run) -> Answer:
    """Return the estimate of `accelerate estimate-memory` for Adam in bf16: the largest of its rows."""
    estimate = import_module("accelerate.commands.estimate").estimate_training_usage
    return Answer(max(estimate(4 * _parameters(run), "bfloat16").values()))


def deepspeed(run: Run) -> Answer:
    """Return DeepSpeed's estimate of model states for ZeRO-2 and ZeRO-3; it has none for less, or for tp.

    One GPU shards nothing, so its ZeRO-2 figure is used for all stages.
    """
    plan, per_node = run.line["plan"], min(8, run.gpus)
    stage, mesh = STAGE[plan.get("sharding", "none")], plan.get("mesh", {})
    stage = 2 if run.gpus == 1 else stage
    if stage < 2 or mesh.get("tp", 1) * mesh.get("pp", 1) > 1:
        return Answer()
    settings = {"num_gpus_per_node": per_node, "num_nodes": run.gpus // per_node, "cpu_offload": False}
    if stage == 2:
        stages = import_module("deepspeed.runtime.zero.stage_1_and_2")
        return Answer(stages.estimate_zero2_model_states_mem_needs(_parameters(run), **settings)[1])
    largest = run.line["model"]["vocab"] * run.line["model"]["hidden"]
    stages = import_module("deepspeed.runtime.zero.stage3")
    settings |= {"cpu_offload_params": False}
    return Answer(stages.estimate_zero3_model_states_mem_needs(_parameters(run), largest, **settings)[1])


def llm_analysis(run: Run) -> Answer:
    """Return llm-analysis's sum of states and activations, and its time at half of the peak, as its notes advise.

    Its check that a feed-forward has GPT's shape is disabled: it would reject every gated model.
    """
    tool, config = _llm_analysis()
    model, plan = run.line["model"], run.line["plan"]
    mesh, name = plan.get("mesh", {}), run.line["cluster"]["gpu"]
    if name not in LLM_ANALYSIS_GPUS or mesh.get("cp", 1) > 1 or "experts" in model:
        return Answer()
    gpu = config.get_gpu_config_by_name(LLM_ANALYSIS_GPUS[name])
    if name == "H200":  # not in its list: an H100 with other memory, as the data sheets say
        gpu = replace(gpu, mem_per_GPU_in_GB=141, hbm_bandwidth_in_GB_per_sec=4800)
    tp, pp = mesh.get("tp", 1), mesh.get("pp", 1)
    data = max(1, run.gpus // (tp * pp))
    steps = plan.get("global_batch", plan["micro_batch"]) // (data * plan["micro_batch"])
    shape = config.ModelConfig(
        name="", num_layers=model["layers"], n_head=model["heads"], hidden_dim=model["hidden"],
        vocab_size=model["vocab"], max_seq_len=model["seq_len"], num_key_value_heads=model["kv_heads"],
        ffn_embed_dim=model["ffn"], expansion_ratio=model["ffn"] / model["hidden"],
    )  # fmt: skip
    split = config.ParallelismConfig(tp_size=tp, pp_size=pp, dp_size=data)
    analysis = tool.LLMAnalysis(shape, gpu, parallelism_config=split, flops_efficiency=0.5)
    level = {"none": 0, "selective": 1, "full": 2}.get(plan.get("recompute", "none"), 0)
    try:
        found = analysis.training(
            batch_size_per_gpu=plan["micro_batch"],
            gradient_accumulation_steps=max(1, steps),
            seq_len=model["seq_len"],
            activation_recomputation=tool.ActivationRecomputation(level),
            ds_zero=tool.DSZeRO(STAGE[plan.get("sharding", "none")]),
            mlp_gated_linear_units=model["gated"],
        )
    except AssertionError as error:
        return Answer(refused="max_batch_size_per_gpu" in str(error))
    tokens = max(1, steps) * data * plan["micro_batch"] * model["seq_len"]
    return Answer(found["(weight+op_state+grad+act)_memory_per_gpu"], tokens / found["latency_per_iter"] / run.gpus)


@cache
def _llm_analysis() -> tuple[Any, Any]:
    tool, config = import_module("llm_analysis.analysis"), import_module("llm_analysis.config")
    logging.getLogger("llm_analysis").disabled = True
    for module in (tool, config):
        module.logger.disabled = True
    vars(tool)["within_range"] = lambda *_: True
    return tool, config


def _parameters(run: Run) -> int:
    return job_of(json.dumps(run.line["model"]), "trimaran").outline.num_parameters


PEERS: dict[str, tuple[str, Callable[[Run], Answer]]] = {
    "llm-analysis": ("llm_analysis", llm_analysis),
    "EleutherAI cookbook": ("", cookbook),
    "accelerate": ("accelerate", accelerate),
    "DeepSpeed": ("deepspeed", deepspeed),
}


def present() -> dict[str, Callable[[Run], Answer]]:
    """Return the installed estimators."""
    return {name: peer for name, (package, peer) in PEERS.items() if not package or find_spec(package)}


def ask_peer(peer: Callable[[Run], Answer], runs: Iterable[Run]) -> list[Case]:
    """Return a peer's prediction for each run. A run fits if the peer's bytes do not exceed the device."""
    cases = []
    for run in runs:
        peak, tokens, refused = peer(run)
        device_bytes = find_device(run.line["cluster"]["gpu"]).memory_bytes
        fits = False if refused else None if peak is None else peak <= device_bytes
        cases.append(Case(run=run, peak_bytes=peak, tokens_per_second_per_gpu=tokens, fits=fits))
    return cases
