"""Our decoder and transformers compute the same logits of mixtures of experts, from files that either has written."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.mixture_models import MIXTURES, save_mixture
from trimaran.core import UserError
from trimaran.models import ModelSpec, outline_of, spec_from_hf, spec_to_hf
from trimaran.nets import Decoder, KeyValueCache, hf_tensors, load_hf_weights

TOKENS = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(1))


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def read(folder: Path) -> tuple[Decoder, ModelSpec]:
    spec = spec_from_hf(json.loads((folder / "config.json").read_text()), where="config.json")
    ours = Decoder(spec).eval()
    load_hf_weights(ours, folder)
    return ours, spec


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_has_the_logits_of_transformers_and_is_written_as_it_was_read(name: str, tmp_path: Path) -> None:
    model = save_mixture(name, tmp_path / "theirs")
    wanted = logits_of(model)
    assert wanted.std() > 0.3
    ours, spec = read(tmp_path / "theirs")
    with torch.no_grad():
        logits, _ = ours(tokens=TOKENS)
        cache = KeyValueCache()
        parts = [ours(tokens=each, extension=cache.extend(each))[0] for each in TOKENS.split([36, 3, 1], dim=1)]
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat(parts, 1), wanted[:, [35, 38, 39]], atol=1e-5, rtol=1e-5)
    count = sum(each.numel() for each in model.parameters())
    assert spec.num_parameters == outline_of(spec).num_parameters == count
    written, read_before = dict(hf_tensors(ours, spec)), load_file(tmp_path / "theirs" / "model.safetensors")
    assert written.keys() == read_before.keys()
    assert all(torch.equal(each, written[key]) for key, each in read_before.items())
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "config.json").write_text(json.dumps(spec_to_hf(spec)))
    save_file(written, tmp_path / "ours" / "model.safetensors", metadata={"format": "pt"})
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    assert type(again) is type(model)
    torch.testing.assert_close(logits_of(again), wanted)


def test_layers_that_predict_later_tokens_are_not_read(tmp_path: Path) -> None:
    save_mixture("deepseek-v3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.ones(32, 64)}, tmp_path / "model.safetensors")
    read(tmp_path)
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.ones(32, 64)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"M021.*eh_proj"):
        read(tmp_path)


def test_documents_of_a_row_do_not_see_each_other(tmp_path: Path) -> None:
    save_mixture("deepseek-v3", tmp_path)
    ours, _ = read(tmp_path)
    documents = (torch.arange(40) >= 17).long().expand(2, -1)
    with torch.no_grad():
        packed = ours(tokens=TOKENS, documents=documents)[0]
        parts = [ours(tokens=each)[0] for each in (TOKENS[:, :17], TOKENS[:, 17:])]
    torch.testing.assert_close(packed, torch.cat(parts, 1), atol=1e-5, rtol=1e-5)


def test_kimi_is_read_as_deepseek_v3(tmp_path: Path) -> None:
    save_mixture("deepseek-v3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    spec = spec_from_hf(config | {"model_type": "kimi_k2"}, where="here")
    assert spec == spec_from_hf(config, where="here") or spec.name == "kimi_k2"
    assert spec_to_hf(spec)["model_type"] == "deepseek_v3"
