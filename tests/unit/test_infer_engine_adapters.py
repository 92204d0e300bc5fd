"""Several adapters in one batch: each sequence gets the tokens of its own adapter, merged and alone."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine_models import CPU, answers_of, open_network, random_prompts, requests_of, save_model, tokens_of
from tests.random_weights import perturb
from tests.serving_models import SPECS
from trimaran.core import AdapterSection, UserError
from trimaran.models import PRESETS, ModelSpec
from trimaran.nets import (
    AdapterBank,
    LatentAttention,
    LoraLinear,
    Network,
    attach_adapter,
    initialise,
    initialise_adapter,
    merge_in_place,
    network_of,
    output_head,
)
from trimaran.serve import (
    BatchingEngine,
    CacheSettings,
    EngineSettings,
    ModelRunner,
    RunnerTraits,
    load_adapter,
    load_peft_folder,
    open_runner,
)

SPEC = replace(PRESETS["tiny"], layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, tied=False,
               block=PRESETS["qwen2.5-7b"].block)  # fmt: skip
CACHE = CacheSettings(max_bytes=1 << 30, max_tokens=200, page_size=4)
SECTIONS = {
    "attention": {"rank": 4, "targets": ("q_proj", "v_proj")},
    "all": {"rank": 2, "alpha": 8.0},
    "dora": {"rank": 4, "kind": "dora"},
    "head": {"rank": 4, "targets": ("lm_head", "o_proj")},
}


def base(spec: ModelSpec = SPEC) -> Network:
    network = network_of(spec)
    initialise(network.module, seed=1, spec=spec)
    torch.manual_seed(4)
    perturb(network.module)
    network.module.eval()
    return network


def attach(network: Network, name: str) -> None:
    fields: dict[str, Any] = dict(SECTIONS[name])
    if name == "attention" and any(isinstance(each, LatentAttention) for each in network.module.modules()):
        fields["targets"] = ("q_a_proj", "kv_b_proj")
    attach_adapter(network, AdapterSection.model_validate(fields))
    initialise_adapter(network.module, seed=1)
    torch.manual_seed(list(SECTIONS).index(name))
    with torch.no_grad():
        for layer in network.module.modules():
            if isinstance(layer, LoraLinear):
                layer.lora_B.normal_(std=0.5)
                if layer.lora_magnitude is not None:
                    layer.lora_magnitude.mul_(1 + 0.5 * torch.rand(len(layer.lora_magnitude)))


def engine_of(network: Network, bank: AdapterBank | None = None, *, overlap: bool = False) -> BatchingEngine:
    settings = EngineSettings(max_running=8, max_step_tokens=24)
    runner = open_runner(network, CPU, torch.float32, CACHE, bank=bank)
    if overlap:
        assert isinstance(runner, ModelRunner)
        runner = ModelRunner(network, CPU, torch.float32, runner.cache, RunnerTraits(overlaps=True), bank)
    return BatchingEngine(runner, settings)


@pytest.mark.parametrize("spec", [SPEC, SPECS["latent"]], ids=["plain", "latent"])
def test_adapters_in_one_batch_are_as_merged_ones_alone(spec: ModelSpec) -> None:
    names: list[Any] = [None, *SECTIONS]
    prompts = random_prompts(len(names) * 2, seed=3)
    requests = [replace(each, adapter=names[int(each.id) % len(names)]) for each in requests_of(prompts, [9] * 10)]
    expected: dict[str, list[int]] = {}
    for name in names:
        network = base(spec)
        if name is not None:
            attach(network, name)
            merge_in_place(network.module)
        own = [replace(each, adapter=None) for each in requests if each.adapter == name]
        expected |= tokens_of(answers_of(engine_of(network), own))
    assert len({tuple(row) for row in expected.values()}) > 8
    network = base(spec)
    bank = AdapterBank(network, output_head(network))
    engine = engine_of(network, bank)
    before = deepcopy(network.module.state_dict())
    for name in SECTIONS:
        attach(network, name)
        bank.take(name)
    assert network.module.state_dict().keys() == before.keys()
    assert engine.runner.traits.adapters == tuple(SECTIONS)
    for each in (engine, engine_of(network, bank, overlap=True)):
        assert tokens_of(answers_of(each, requests, [0, 0, 0, 1, 1, 1, 2, 2, 3, 3])) == expected
    only = [each for each in requests if each.adapter == "dora"]
    assert tokens_of(answers_of(engine, only)) == {each.id: expected[each.id] for each in only}


def test_an_adapter_is_replaced_under_its_name() -> None:
    network = base()
    bank = AdapterBank(network, output_head(network))
    engine = engine_of(network, bank)
    (request,) = requests_of([(1, 2, 3, 4, 5, 6)], [9], adapter="mine")
    found = []
    for name in ("attention", "all"):
        attach(network, name)
        bank.take("mine")
        engine.flush_prefixes()
        found.append(tokens_of(answers_of(engine, [request]))["0"])
        merged = base()
        attach(merged, name)
        merge_in_place(merged.module)
        assert found[-1] == tokens_of(answers_of(engine_of(merged), [replace(request, adapter=None)]))["0"]
    assert found[0] != found[1]


def test_an_adapter_that_trains_modules_in_full_is_refused() -> None:
    network = base()
    bank = AdapterBank(network, output_head(network))
    attach_adapter(network, AdapterSection.model_validate({"rank": 2, "train": ("embed_tokens",)}))
    with pytest.raises(UserError, match="E009"):
        bank.take("wide")
    bank.discard()
    assert bank.names == []
    assert not any(isinstance(each, LoraLinear) for each in network.module.modules())


@pytest.mark.parametrize("name", ["llama", pytest.param("mistral", marks=pytest.mark.slow)])
def test_folders_that_peft_has_written_are_served_together(name: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    folder = save_model(name, tmp_path / "base")
    requests = requests_of(random_prompts(6, seed=9), [8] * 6)
    expected: dict[str, list[int]] = {}
    for number, targets in enumerate((["q_proj", "up_proj"], ["v_proj", "o_proj", "down_proj"])):
        base_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        torch.manual_seed(number)
        config = LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=False)
        adapted: Any = get_peft_model(base_model, config)
        adapted.save_pretrained(tmp_path / f"adapter-{number}")
        merged = adapted.merge_and_unload().eval()
        for request in requests[number::2]:
            ids = torch.tensor([request.prompt])
            out = merged.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
            expected[request.id] = out[0, len(request.prompt) :].tolist()
    network = open_network(folder)
    bank = AdapterBank(network, output_head(network))
    engine = engine_of(network, bank)
    for number in range(2):
        load_peft_folder(network, bank, f"adapter-{number}", tmp_path / f"adapter-{number}")
    requests = [replace(each, adapter=f"adapter-{int(each.id) % 2}") for each in requests]
    assert tokens_of(answers_of(engine, requests, [0, 0, 0, 2, 2, 3])) == expected


def test_an_adapter_that_cannot_be_read_leaves_the_network_as_it_was(tmp_path: Path) -> None:
    network = base()
    bank = AdapterBank(network, output_head(network))

    def fail(*_: Any) -> None:
        raise UserError("K051", "damaged", where="", fix="")

    with pytest.raises(UserError, match="K051"):
        load_adapter(network, bank, "mine", AdapterSection.model_validate(SECTIONS["all"]), fail)
    assert not any(isinstance(each, LoraLinear) for each in network.module.modules())
    assert bank.names == []
