"""Small recipes of every preset and of many Hugging Face architectures, and random plans that pass the planner."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from tests.unit.test_models_outline_hf import CAUSAL, LLAMA, MIXED, VISION, VLMS, WIDE_HEADS
from trimaran.core import AXES, CONTEXTS, Mesh, Plan, Recipe, UserError
from trimaran.machine import parse_cluster
from trimaran.models import PERCEPTION_PRESETS, PRESETS, VLM_PRESETS, HfFacts, outline_if_known, spec_of
from trimaran.planner import check_plan

SEQ_LEN = 16
SHAPE = {"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 4, "head_dim": 8, "ffn": 96, "max_seq_len": 256}
EXPERTS = {"experts": {"num_experts": 8, "top_k": 2, "ffn": 32}}
VISION_SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "full_layers": []}
MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 4}
MORE_CAUSAL: dict[str, dict[str, Any]] = {
    "olmo": LLAMA,
    "olmoe": LLAMA | MIXED,
    "stablelm": LLAMA,
    "glm": LLAMA | {"head_dim": 8, "pad_token_id": 0},
    "glm4": LLAMA | {"head_dim": 8, "pad_token_id": 0},
    "nemotron": LLAMA,
    "helium": WIDE_HEADS,
    "smollm3": LLAMA | {"pad_token_id": 0},
    "exaone4": LLAMA,
    "ernie4_5": LLAMA,
    "cohere": LLAMA,
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32},
    "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32, "rotary_dim": 4},
    "mamba": MAMBA,
    "persimmon": LLAMA,
    "granitemoe": LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
LONG_ENOUGH = {"max_position_embeddings": 64, "n_positions": 64}


def preset_sections() -> Iterator[dict[str, Any]]:
    """Yield a small model of every preset."""
    for name, spec in PRESETS.items():
        yield {"preset": name, "shape": SHAPE | {"vocab": 320} | (EXPERTS if spec.block.experts else {})}
    for name, spec in VLM_PRESETS.items():
        vocabulary = {"vocab": spec.image_token + 20} if spec.image_token > 320 else {}
        language = SHAPE | {"hidden": 32, "ffn": 48} | vocabulary
        yield {"family": "vlm", "preset": name, "shape": {"language": language, "vision": VISION_SHAPE}}
    for name in PERCEPTION_PRESETS:
        shape = {"camera_widths": [8, 16], "hidden": 32, "ffn": 48, "height": 32, "width": 64, "cells": 24}
        yield {"family": "perception", "preset": name, "shape": shape}


def hf_configs() -> dict[str, dict[str, Any]]:
    """Return a tiny config.json of every architecture, by a name."""
    kinds = {"": CAUSAL, "images-": VLMS} | {f"vision{number}-": each for number, each in enumerate(VISION.values())}
    known = {
        f"{prefix}{kind}-{number}": {"model_type": kind, **fields}
        for prefix, shapes in kinds.items()
        for kind, variants in shapes.items()
        for number, fields in enumerate(variants)
    }
    more = {kind: {"model_type": kind, **fields} for kind, fields in MORE_CAUSAL.items()}
    found = {**known, **more, "no-such-architecture": {"model_type": "internvl_chat", **LLAMA}}
    return {
        name: config | {field: size for field, size in LONG_ENOUGH.items() if field in config}
        for name, config in found.items()
    }


def write_configs(folder: Path) -> dict[str, Path]:
    """Write a folder for each of `hf_configs`, and return them by name."""
    folders = {}
    for name, config in hf_configs().items():
        folders[name] = folder / name
        folders[name].mkdir()
        (folders[name] / "config.json").write_text(json.dumps(config))
    return folders


def random_case(chance: Random, section: dict[str, Any]) -> tuple[Recipe, Plan] | None:
    """Return a recipe of the model with a random plan that the planner accepts without facts; None if none was found.

    Pinned adapters and frozen towers are part of it. Devices are H100s, of which the plan may have 1,024.
    """
    for _ in range(200):
        mesh = Mesh(**{axis: chance.choice((1, 1, 1, 2, 2, 3, 4, 8)) for axis in AXES})
        if not 1 <= mesh.world_size <= 1024:
            continue
        plan = Plan.model_validate(_fields(chance, mesh, section.get("family", "decoder")))
        try:
            recipe = _recipe(chance, section, plan)
            cluster = parse_cluster(f"{mesh.world_size}x1xH100")
            spec, outline = spec_of(recipe.model), outline_if_known(recipe.model, recipe.data)
            check_plan(plan, recipe, spec, cluster, outline)
        except UserError:
            continue
        return recipe, plan
    return None


def planner_refusal(recipe: Recipe, plan: Plan, facts: HfFacts) -> UserError | None:
    """Return why the planner refuses the plan if it knows what training can do with the model."""
    cluster = parse_cluster(f"{plan.mesh.world_size}x1xH100")
    try:
        check_plan(plan, recipe, spec_of(recipe.model), cluster, outline_if_known(recipe.model, recipe.data), facts)
    except UserError as error:
        return error
    return None


def _fields(chance: Random, mesh: Mesh, family: str) -> dict[str, Any]:
    schedule = chance.choice(("1f1b", "gpipe", "interleaved", "zero-bubble"))
    sharding = chance.choice(("optimizer", "gradients", "parameters")) if mesh.shards > 1 else "none"
    towers = {}
    if family == "vlm" and chance.random() < 0.5:
        towers = {"vision": {"tp": chance.choice((1, mesh.tp)), "sharding": chance.choice((None, "none"))}}
    return {
        "mesh": mesh,
        "sharding": sharding,
        "pipeline": {"schedule": schedule},
        "micro_batch": chance.choice((1, 2)),
        "grad_accum": chance.choice((1, 2, mesh.pp, 2 * mesh.pp)),
        "precision": chance.choice(("fp32", "bf16", "bf16", "fp16")),
        "recompute": chance.choice(("none", "selective", "full", 2)),
        "offload": chance.choice(("none", "none", "optimizer", "parameters", "activations")),
        "compile": chance.random() < 0.3,
        "loss": chance.choice(("logits", "fused", "chunked")) if mesh.tp == mesh.pp == 1 else "logits",
        "comm": {"context": chance.choice(CONTEXTS), "regather": chance.random() < 0.2},
        "towers": towers,
    }


def _recipe(chance: Random, section: dict[str, Any], plan: Plan) -> Recipe:
    model = dict(section)
    if chance.random() < 0.3:
        model["adapter"] = chance.choice(({"kind": "lora", "rank": 4}, {"kind": "dora", "rank": 4},
                                          {"kind": "lora", "rank": 4, "targets": ["*.nowhere"]},
                                          {"kind": "lora", "rank": 4096}))  # fmt: skip
    precision = chance.choice(({}, {}, {}, {"*.nothing": "fp32"}))
    seq_len = chance.choice((SEQ_LEN, SEQ_LEN, SEQ_LEN * plan.mesh.cp * 2, 128))
    tree = {
        "model": model,
        "data": {"seq_len": seq_len},
        "train": {"steps": 1, "global_batch": plan.global_batch, "precision": precision},
    }
    return Recipe.model_validate(tree)
