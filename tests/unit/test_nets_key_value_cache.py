"""A network with a key-value cache computes the same logits, and so the same tokens, as one without it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, MistralForCausalLM

from tests import hf_models, vlm_models
from trimaran.core import ModelSection
from trimaran.models import PRESETS, spec_of
from trimaran.nets import (
    MIN_CAPACITY,
    HfCache,
    Network,
    cache_difference,
    hf_network,
    initialise,
    load_hf_model,
    network_of,
    network_of_hf,
)

TOLERANCE = 1e-5
DENSE = replace(PRESETS["tiny"], layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96)
SPECS = {
    "grouped-heads": DENSE,
    "llama-3.1-rope": replace(DENSE, block=PRESETS["llama-3.1-8b"].block),
    "qk-norm": replace(DENSE, block=PRESETS["qwen3-8b"].block),
    "qkv-bias": replace(DENSE, kv_heads=4, block=PRESETS["qwen2.5-7b"].block),
    "experts": replace(PRESETS["tiny-moe"], layers=2),
}


def own_network(spec: Any) -> Network:
    network = network_of(spec)
    initialise(network.module, seed=5, spec=spec)
    vlm_models.perturb(network.module)
    network.module.eval()
    return network


def hf_network_of(name: str, folder: Path) -> Network:
    return hf_network(load_hf_model(hf_models.save_model(name, folder), trust_remote_code=False, seed=0).eval(), None)


@torch.no_grad()
def likeliest(network: Network, prompt: Tensor, tokens: int) -> tuple[list[int], list[Tensor]]:
    """Return the likeliest next tokens and their logits, with a forward of the whole sequence for each.

    The sequence goes on with the token `number` ids after the likeliest: a repeated token would hide a wrong position.
    """
    ids, rows = prompt, []
    for number in range(tokens):
        rows.append(network.forward({"tokens": ids[None]})[0][0, -1])
        ids = torch.cat([ids, (rows[-1].argmax(keepdim=True) + number) % len(rows[-1])])
    return [int(row.argmax()) for row in rows], rows


@torch.no_grad()
def likeliest_with_cache(network: Network, prompt: Tensor, tokens: int) -> tuple[list[int], list[Tensor]]:
    """Return the same as `likeliest`, with one forward of the prompt and then forwards of one token."""
    cache, new, rows = network.new_cache(), prompt, []
    for number in range(tokens):
        rows.append(network.extend(cache, {"tokens": new[None]})[0, 0])
        new = (rows[-1].argmax(keepdim=True) + number) % len(rows[-1])
    return [int(row.argmax()) for row in rows], rows


def assert_same_tokens(network: Network, *, prompt: int, tokens: int, vocabulary: int = 96) -> None:
    ids = torch.randint(vocabulary, (prompt,), generator=torch.Generator().manual_seed(1))
    expected, logits = likeliest(network, ids, tokens)
    cached, cached_logits = likeliest_with_cache(network, ids, tokens)
    assert cached == expected
    for with_cache, without in zip(cached_logits, logits, strict=True):
        torch.testing.assert_close(with_cache, without, atol=TOLERANCE * float(without.abs().max()), rtol=TOLERANCE)


@pytest.mark.parametrize("name", SPECS)
def test_our_decoder_generates_the_same_tokens_with_a_cache(name: str) -> None:
    assert_same_tokens(own_network(SPECS[name]), prompt=7, tokens=16, vocabulary=320)


def test_a_long_prompt_is_one_forward_and_the_memory_grows() -> None:
    assert_same_tokens(own_network(DENSE), prompt=2 * MIN_CAPACITY - 2, tokens=5, vocabulary=320)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3", "qwen3-moe"])
def test_a_hugging_face_model_generates_the_same_tokens_with_a_cache(name: str, tmp_path: Path) -> None:
    network = hf_network_of(name, tmp_path)
    torch.manual_seed(3)
    vlm_models.perturb(network.module)
    assert_same_tokens(network, prompt=9, tokens=14)
    assert isinstance(network.new_cache(), HfCache) == (name in ("mistral", "gemma3"))
    if isinstance(network.new_cache(), HfCache):
        assert cache_difference(network.module, torch.device("cpu")) == ""


class Forgetful(MistralForCausalLM):
    """Takes a cache and computes without it."""

    def forward(self, past_key_values: Any = None, **rest: Any) -> Any:
        return super().forward(**rest)


class Uncached(MistralForCausalLM):
    """Takes no cache."""

    def forward(self, *, input_ids: Tensor, use_cache: bool) -> Any:
        return super().forward(input_ids)


def test_a_model_that_ignores_its_cache_is_noticed() -> None:
    config = hf_models.CONFIGS["mistral"]
    assert cache_difference(Forgetful(config).eval(), torch.device("cpu")).startswith("its logits differ by")
    assert cache_difference(Uncached(config).eval(), torch.device("cpu")).startswith("TypeError")


@pytest.mark.parametrize("name", ["grouped-heads", "mistral"])
@torch.no_grad()
def test_a_truncated_cache_continues_with_other_tokens(name: str, tmp_path: Path) -> None:
    network = own_network(DENSE) if name in SPECS else hf_network_of(name, tmp_path)
    ids = torch.randint(96, (12,), generator=torch.Generator().manual_seed(4))
    other = torch.cat([ids[:5], ids.flip(0)])
    cache = network.new_cache()
    network.extend(cache, {"tokens": ids[None]})
    cache.truncate(5)
    logits = network.extend(cache, {"tokens": other[None, cache.length :]})
    assert cache.length == 17
    expected = network.forward({"tokens": other[None]})[0][0, -1]
    torch.testing.assert_close(logits[0, 0], expected, atol=TOLERANCE * float(expected.abs().max()), rtol=TOLERANCE)


@pytest.mark.parametrize("name", ["native", "tiled", "deepstack", "qwen2-vl", "llava", "internvl"])
@torch.no_grad()
def test_a_model_that_sees_keeps_its_images_in_the_cache(name: str, tmp_path: Path) -> None:
    if name in vlm_models.SPECS:
        network = own_network(vlm_models.SPECS[name])
    else:
        AutoModelForImageTextToText.from_config(vlm_models.CONFIGS[name]).save_pretrained(tmp_path)
        module = load_hf_model(tmp_path, trust_remote_code=False, seed=0).eval()
        network = network_of_hf(module, spec_of(ModelSection(family="hf", path=str(tmp_path))))
    spec: Any = network.spec
    images = vlm_models.random_images(vlm_models.SHAPES.get("llava", ()) if spec.vision.tile else vlm_models.VARIOUS)
    inputs = vlm_models.inputs_of(spec, images, [[None, 0, None, 1, None]])
    length = inputs["tokens"].shape[1]
    if spec.sections:
        inputs["positions"] = torch.randint(0, length, (3, 1, length), generator=torch.Generator().manual_seed(4))
    whole = network.forward(inputs)[0][0, -1]
    cache, cut = network.new_cache(), length - 2
    parts: list[dict[str, Tensor]] = []
    for piece in (slice(0, cut), slice(cut, cut + 1), slice(cut + 1, length)):
        part = {"tokens": inputs["tokens"][:, piece]}
        if spec.sections:
            part["positions"] = inputs["positions"][:, :, piece]
        parts.append(part)
    parts[0] |= {each: inputs[each] for each in ("patches", "grids")}
    last = [network.extend(cache, part) for part in parts][-1]
    torch.testing.assert_close(last[0, 0], whole, atol=TOLERANCE * float(whole.abs().max()), rtol=TOLERANCE)
