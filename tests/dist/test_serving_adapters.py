"""Adapters and quantised weights over gloo ranks: every split answers token by token as one process."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests import hf_models
from tests.ranks import run_ranks
from tests.serving_models import DENSE, PROMPTS, SPECS, save_spec
from tests.serving_ranks import answers, on_ranks, place_of, requests_for, served
from trimaran.core import AdapterSection, ModelSection, UserError
from trimaran.nets import (
    PEFT_CONFIG,
    PEFT_WEIGHTS,
    AdapterBank,
    LoraLinear,
    Network,
    PagedCache,
    adapter_parameters,
    attach_adapter,
    hf_modules,
    output_head,
    peft_config,
    peft_tensors,
)
from trimaran.serve import (
    EngineRequest,
    ModelRunner,
    Quantisation,
    QuantisedLinear,
    RankedRunner,
    ServedModel,
    is_supported,
    join_ranks,
    load_peft_folder,
    open_part,
    quantise_linear,
    restored_weight,
    traits_of,
)
from trimaran.train import load_trained

CPU = torch.device("cpu")
TOKENS = 7
# Biases of queries, keys and values are inside what DoRA rescales.
SPEC = SPECS["qkv-bias"]
SECTIONS: dict[str, dict[str, Any]] = {
    "attention": {"rank": 4, "targets": ("q_proj", "v_proj")},
    "dora": {"rank": 4, "kind": "dora"},
    "head": {"rank": 2, "targets": ("lm_head", "o_proj", "down_proj")},
}
# Slices for two ranks are still multiples of 128 inputs.
WIDE = replace(DENSE, layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=512, tied=False)


def save_adapter(network: Network, section: AdapterSection, folder: Path, seed: int) -> Path:
    """Save a random adapter of the network as PEFT does, and return the folder."""
    attach_adapter(network, section)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, each in adapter_parameters(network.module):
            each.copy_(torch.randn(each.shape, generator=random) * 0.5 + (2 if "magnitude" in name else 0))
    tensors = {name: each.contiguous() for name, each in peft_tensors(network)}
    folder.mkdir(parents=True)
    save_file(tensors, folder / PEFT_WEIGHTS)
    (folder / PEFT_CONFIG).write_text(json.dumps(peft_config(section, tensors, hf_modules(network))))
    return folder


def save_adapters(base: ModelSection, path: Path, to: Path) -> dict[str, Path]:
    folders = {}
    for seed, (name, fields) in enumerate(SECTIONS.items()):
        section = AdapterSection.model_validate(fields)
        folders[name] = save_adapter(load_trained(base, path, CPU), section, to / name, seed)
    return folders


def alone(model: ServedModel) -> ModelRunner:
    """Return the runner of one process, with the adapters, or quantised linear layers, of the model."""
    network = load_trained(model.section, model.folder, CPU)
    network.module.eval().requires_grad_(False)
    bank = AdapterBank(network, output_head(network)) if model.adapters else None
    for name, folder in model.adapters.items():
        assert bank is not None
        load_peft_folder(network, bank, name, folder)
    if (kind := model.quantise) is not None:
        for _, layer in quantised_layers(network):
            quantise_linear(layer, kind)
    assert isinstance(model.num_pages, int)
    cache = PagedCache(model.num_pages, model.page_size)
    return ModelRunner(network, CPU, model.dtype, cache, traits_of(network), bank)


def quantised_layers(network: Network) -> list[tuple[str, nn.Linear]]:
    inside = {id(each) for block in network.blocks for each in block.modules()}
    return [(name, each) for name, each in network.module.named_modules()
            if type(each) is nn.Linear and id(each) in inside and is_supported(each)]  # fmt: skip


def mixed_requests(names: Mapping[str, Path], prompts: list[list[int]] = PROMPTS) -> list[EngineRequest]:
    """Return requests of which each has another adapter, and one has none."""
    chosen = [None, *names]
    requests = requests_for([each for each in prompts for _ in range(2)], TOKENS)
    return [replace(each, adapter=chosen[number % len(chosen)]) for number, each in enumerate(requests)]


def names_and_answers(runner: RankedRunner, requests: list[EngineRequest]) -> Any:
    return runner.traits.adapters, answers(runner, requests)[0]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), pytest.param(2, 1, marks=SLOW), pytest.param(1, 2, marks=SLOW)])
def test_adapters_in_one_batch_answer_as_in_one_process(tp: int, pp: int, tmp_path: Path) -> None:
    folder = save_spec(SPEC, tmp_path / "model")
    section = ModelSection(path=str(folder))
    model = served(folder, num_pages=64, adapters=save_adapters(section, folder, tmp_path / "adapters"))
    requests = mixed_requests(model.adapters)
    names, found = run_ranks(tp * pp, on_ranks, model, tp, pp, names_and_answers, requests)[0]
    assert names == tuple(SECTIONS)
    assert found == answers(alone(model), requests)[0]
    without = answers(alone(served(folder, num_pages=64)), [replace(each, adapter=None) for each in requests])[0]
    changed = [each.id for each in requests if each.adapter is not None and found[each.id] != without[each.id]]
    assert len(changed) >= len(requests) / 2, "an adapter that changes nothing would hide a mistake"


@pytest.mark.slow
def test_adapters_of_a_transformers_model_answer_alike(tmp_path: Path) -> None:
    folder = hf_models.save_model("llama", tmp_path / "model")
    section = ModelSection(family="hf", path=str(folder))
    model = served(folder, "hf", num_pages=64, adapters=save_adapters(section, folder, tmp_path / "adapters"))
    requests = mixed_requests(model.adapters, [[each % 96 for each in prompt] for prompt in PROMPTS[:3]])
    _, found = run_ranks(2, on_ranks, model, 2, 1, names_and_answers, requests)[0]
    assert found == answers(alone(model), requests)[0]


def restored_slices(model: ServedModel, tp: int) -> dict[str, Tensor]:
    """Return what this rank's quantised weights stand for."""
    ranks, watch = join_ranks(place_of(tp, 1))
    part = open_part(model, ranks)[0].module
    found = {name: restored_weight(each.weight, each.scales, each.zeros)
             for name, each in part.named_modules() if isinstance(each, QuantisedLinear)}  # fmt: skip
    watch.close()
    return found


@pytest.mark.parametrize("kind", [pytest.param("fp8", marks=SLOW), "int8", pytest.param("int4", marks=SLOW)])
def test_quantised_slices_are_slices_of_the_quantised_whole(kind: Quantisation, tmp_path: Path) -> None:
    model = served(save_spec(WIDE, tmp_path / "model"), quantise=kind)
    network = alone(model).network
    whole = {name: restored_weight(each.weight, each.scales, each.zeros)
             for name, each in network.module.named_modules() if isinstance(each, QuantisedLinear)}  # fmt: skip
    assert len(whole) == 7 * WIDE.layers
    parts = run_ranks(2, restored_slices, model, 2)
    for name, expected in whole.items():
        dim = 1 if name.endswith(("o_proj", "down_proj")) else 0
        assert torch.equal(torch.cat([part[name] for part in parts], dim), expected), name


@pytest.mark.parametrize(
    ("kind", "tp", "pp"),
    [("int4", 2, 1), pytest.param("int8", 1, 2, marks=SLOW), pytest.param("fp8", 2, 2, marks=SLOW)],
)
def test_quantised_weights_answer_as_in_one_process(kind: Quantisation, tp: int, pp: int, tmp_path: Path) -> None:
    """A CPU computes with the restored weights, in fp32, so that the answers are those of one process."""
    folder = save_spec(WIDE, tmp_path / "model")
    model, requests = served(folder, num_pages=64, quantise=kind), requests_for(PROMPTS[:3], TOKENS)
    found, _ = run_ranks(tp * pp, on_ranks, model, tp, pp, answers, requests)[0]
    assert found == answers(alone(model), requests)[0]
    assert found != answers(alone(served(folder, num_pages=64)), requests)[0]


def refusal(model: ServedModel, tp: int, pp: int) -> str:
    try:
        on_ranks(model, tp, pp, lambda runner: None)
    except UserError as error:
        return error.code
    return ""


def test_slices_and_adapters_that_do_not_fit_are_refused_on_every_rank(tmp_path: Path) -> None:
    narrow = served(save_spec(replace(WIDE, ffn=128), tmp_path / "narrow"), quantise="int4")
    assert run_ranks(2, refusal, narrow, 2, 1) == ["U020"] * 2
    assert run_ranks(2, refusal, replace(narrow, quantise=None), 2, 1) == [""] * 2
    small = save_spec(replace(SPEC, hidden=24, head_dim=6), tmp_path / "small")
    other = save_adapters(ModelSection(path=str(small)), small, tmp_path / "other")
    wrong = served(save_spec(SPEC, tmp_path / "model"), adapters=other)
    codes = run_ranks(2, refusal, wrong, 1, 2)
    assert set(codes) == {"K052"}


@pytest.mark.slow
def test_an_adapter_is_gone_from_its_layers_once_it_is_taken(tmp_path: Path) -> None:
    folder = save_spec(SPEC, tmp_path / "model")
    adapters = save_adapters(ModelSection(path=str(folder)), folder, tmp_path / "adapters")
    model = served(folder, adapters=adapters)
    assert run_ranks(2, lora_layers, model, 2) == [0, 0]


def lora_layers(model: ServedModel, tp: int) -> int:
    ranks, watch = join_ranks(place_of(tp, 1))
    part = open_part(model, ranks)[0].module
    watch.close()
    return sum(isinstance(each, LoraLinear) for each in part.modules())
