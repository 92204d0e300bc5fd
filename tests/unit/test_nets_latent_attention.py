"""Latent attention over a cache of narrow vectors computes what it computes without a cache."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving_models import LATENT, SPECS, random_network
from tests.unit.test_infer_engine_adapters import attach
from tests.unit.test_models_published import DEEPSEEK_V2_LITE, DEEPSEEK_V3
from trimaran.core import ModelSection
from trimaran.machine import find_device
from trimaran.models import outline_for, outline_of, spec_from_hf
from trimaran.nets import HostLengthsNeededError, LatentAttention, Network, PagedCache, PagedExtension
from trimaran.serve import (
    CacheSettings,
    Layout,
    Traffic,
    captures_steps,
    compute_in_bf16,
    open_runner,
    quantise_linear,
    serving_memory,
)

CPU = torch.device("cpu")
DENSE = spec_from_hf(LATENT | {"kv_lora_rank": 128, "first_k_dense_replace": 3}, where="here")
TOKENS = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(1))


def changed(kind: str) -> Network:
    """Return a network whose `kv_b_proj` has weights of this kind."""
    network = random_network(DENSE)
    if kind == "lora":
        attach(network, "attention")
    if kind == "bf16":
        compute_in_bf16(network.module)
    for part in network.module.modules():
        if isinstance(part, LatentAttention) and kind == "int4":
            quantise_linear(part.kv_b_proj, "int4")
    network.module.eval()
    return network


@pytest.mark.parametrize(("kind", "tolerance"), [("fp32", 1e-5), ("lora", 1e-5), ("int4", 1e-5), ("bf16", 0.03)])
@torch.no_grad()
def test_tokens_after_cached_ones_have_the_logits_of_a_whole_sequence(kind: str, tolerance: float) -> None:
    """4 new tokens attend to keys and values that are made again; the query of a single one absorbs the weight."""
    network = changed(kind)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "bf16"):
        whole = network.forward({"tokens": TOKENS})[0][:, [6, 10, 11]].float()
        cache = network.new_cache()
        parts = [network.extend(cache, {"tokens": each}).float() for each in TOKENS.split([7, 4, 1], dim=1)]
    assert whole.std() > 0.3
    assert (torch.cat(parts, 1) - whole).abs().max() < tolerance * whole.abs().max()


def test_a_page_has_a_narrow_vector_of_each_token_and_layer() -> None:
    network, spec = random_network(SPECS["latent"]), SPECS["latent"]
    runner = open_runner(network, CPU, torch.float32, CacheSettings(max_bytes=1 << 16, page_size=8))
    latent = spec.block.attention.latent
    assert latent is not None
    page_bytes = 8 * spec.layers * (latent.kv_rank + latent.rope_dim) * 4
    assert runner.num_pages == (1 << 16) // page_bytes
    planned = serving_memory(outline_of(spec), Layout(weights="fp32"), find_device("H100"), Traffic(page_size=8))
    assert planned.page_bytes == page_bytes


@pytest.mark.parametrize(("config", "per_token"), [(DEEPSEEK_V3, 70_272), (DEEPSEEK_V2_LITE, 31_104)])
def test_the_plan_counts_576_numbers_for_each_token_and_layer_on_every_rank(config: Any, per_token: int) -> None:
    outline = outline_of(spec_from_hf(config | {"max_position_embeddings": 4096}, where="here"))
    assert per_token == config["num_hidden_layers"] * (512 + 64) * 2
    for tp in (1, 8):
        assert serving_memory(outline, Layout(tp=tp), find_device("H100"), Traffic()).page_bytes == 16 * per_token
    assert captures_steps(outline, Layout(), find_device("H100"))


def test_the_plan_of_a_model_of_transformers_counts_keys_and_values_of_all_heads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3 | {"max_position_embeddings": 4096}))
    outline = outline_for(ModelSection(family="hf", path=str(tmp_path)))
    per_token = 61 * 128 * (192 + 128) * 2
    assert serving_memory(outline, Layout(), find_device("H100"), Traffic()).page_bytes == 16 * per_token
    assert not captures_steps(outline, Layout(), find_device("H100"))


def test_a_step_whose_lengths_only_the_device_knows_is_refused() -> None:
    network, index = random_network(SPECS["latent"]), torch.zeros(1, dtype=torch.long)
    step = PagedExtension(
        cache=PagedCache(1, 4), positions=index[None], slots=index, page_tables=index[None], context_lengths=index + 1,
        query_starts=torch.tensor([0, 1]), kept=None, query_lengths=(), key_lengths=(), num_decodes=1,
    )  # fmt: skip
    with pytest.raises(HostLengthsNeededError, match="no kernel"), torch.no_grad():
        network.extend_pages(step, {"tokens": index[None]})
