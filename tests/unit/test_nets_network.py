import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from tests.hf_models import CONFIGS, SMALL
from trimaran.core import ModelSection, UserError
from trimaran.models import PRESETS, spec_of
from trimaran.nets import HfNetwork, decoder_network, hf_network, initialise, load_hf_model
from trimaran.nets.hf import hf as hf_module

LLAMA = LlamaConfig(**SMALL)
TOKENS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))


def from_config(config: PreTrainedConfig, folder: Path, seed: int = 0) -> HfNetwork:
    config.save_pretrained(folder)
    spec = spec_of(ModelSection(family="hf", path=str(folder)))
    return hf_network(load_hf_model(folder, trust_remote_code=False, seed=seed), spec)


def test_a_decoder_network_has_its_layers_as_blocks() -> None:
    spec = replace(PRESETS["tiny"], layers=3)
    network = decoder_network(spec)
    initialise(network.module, seed=0, spec=spec)
    logits, balance = network.forward({"tokens": TOKENS})
    assert (logits.shape, balance.shape) == ((2, 24, 320), ())
    assert len(network.blocks) == 3
    assert network.spec is spec


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "mistral", "gemma3"])
def test_a_packed_document_gives_the_same_logits_as_alone_in_an_hf_model(name: str, tmp_path: Path) -> None:
    network = from_config(CONFIGS[name], tmp_path)
    lengths = [(5, 19), (10, 6, 8)]
    documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    with torch.no_grad():
        packed, balance = network.forward({"tokens": TOKENS, "documents": documents})
        for row, parts in enumerate(lengths):
            for logits, alone in zip(packed[row].split(parts), TOKENS[row].split(parts), strict=True):
                torch.testing.assert_close(logits, network.forward({"tokens": alone[None]})[0][0], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(packed, network.forward({"tokens": TOKENS})[0], atol=1e-3)
    assert balance == 0


def test_an_hf_network_has_its_blocks_and_its_spec_if_there_is_one(tmp_path: Path) -> None:
    llama, gpt2 = from_config(LLAMA, tmp_path / "llama"), from_config(CONFIGS["gpt2"], tmp_path / "gpt2")
    assert [type(block).__name__ for block in llama.blocks] == ["LlamaDecoderLayer"] * 2
    assert [type(block).__name__ for block in gpt2.blocks] == ["GPT2Block"] * 2
    assert llama.spec is not None
    assert llama.spec.num_parameters == sum(each.numel() for each in llama.module.parameters())
    assert gpt2.spec is None


def test_a_config_without_weights_gives_random_fp32_weights_from_the_seed(tmp_path: Path) -> None:
    one, same, other = (from_config(LLAMA, tmp_path, seed).module.state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_saved_weights_are_loaded_as_fp32_and_the_kv_cache_is_off(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = AutoModelForCausalLM.from_config(LLAMA).to(torch.bfloat16)
    saved.save_pretrained(tmp_path)
    module = load_hf_model(tmp_path, trust_remote_code=False, seed=0)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert torch.equal(module.state_dict()["lm_head.weight"], saved.lm_head.weight.float())
    assert module.config.use_cache is False  # pyrefly: ignore[missing-attribute]


def write_config(folder: Path, **fields: object) -> None:
    (folder / "config.json").write_text(json.dumps(fields))


def test_an_unknown_architecture_is_a_clear_error(tmp_path: Path) -> None:
    write_config(tmp_path, model_type="no-such-network")
    with pytest.raises(UserError, match="M024"):
        load_hf_model(tmp_path, trust_remote_code=False, seed=0)


def test_code_that_comes_with_a_model_runs_only_when_it_is_trusted(tmp_path: Path) -> None:
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    write_config(tmp_path, model_type="homemade", auto_map=names)
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError, match="M025"):
        load_hf_model(tmp_path, trust_remote_code=False, seed=0)
    assert not (tmp_path / "ran").exists()


def test_missing_broken_and_pickled_models_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="M004"):
        load_hf_model(tmp_path / "absent", trust_remote_code=False, seed=0)
    model = AutoModelForCausalLM.from_config(LLAMA)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match="M024"):
        load_hf_model(tmp_path, trust_remote_code=False, seed=0)
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="M020"):
        load_hf_model(tmp_path, trust_remote_code=False, seed=0)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(LLAMA).save_pretrained(tmp_path)
    LlamaConfig(**SMALL | {"num_hidden_layers": 3}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"M021.*layers\.2"):
        load_hf_model(tmp_path, trust_remote_code=False, seed=0)
    LlamaConfig(**SMALL | {"intermediate_size": 64}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="M024"):
        load_hf_model(tmp_path, trust_remote_code=False, seed=0)


def test_without_transformers_the_error_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_module, "transformers", None)
    with pytest.raises(UserError, match=r"M023[\s\S]*trimaran\[hf\]"):
        load_hf_model(tmp_path, trust_remote_code=False, seed=0)
