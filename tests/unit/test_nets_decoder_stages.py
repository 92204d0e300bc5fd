"""Pipeline stages of a decoder: together they equal the full model, and each reads only its own weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trimaran.core import UserError
from trimaran.models import PRESETS, ModelSpec
from trimaran.nets import Decoder, hf_tensors, initialise, load_hf_weights

DENSE = replace(PRESETS["tiny"], layers=3, hidden=32, ffn=64, heads=4, kv_heads=2, head_dim=8)
MIXED = replace(PRESETS["tiny-moe"], layers=3, hidden=32, heads=4, kv_heads=2, head_dim=8)
SPECS = {"dense": DENSE, "tied": replace(DENSE, tied=True), "mixed": MIXED}
STAGE_SPLITS = (range(2), range(2, 3))
TOKENS = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(1))
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 11, [0] * 16])


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    return SPECS[request.param]


def initialised(spec: ModelSpec, layers: range | None = None) -> Decoder:
    module = Decoder(spec, layers)
    initialise(module, seed=5, spec=spec)
    return module


def test_consecutive_stages_compute_the_same_as_the_full_model(spec: ModelSpec) -> None:
    logits, balance = initialised(spec)(tokens=TOKENS, documents=DOCUMENTS)
    stream: tuple[torch.Tensor, ...] = ()
    balances = []
    for layers in STAGE_SPLITS:
        out, stage_balance = initialised(spec, layers)(*stream, tokens=TOKENS, documents=DOCUMENTS)
        stream = (out,)
        balances.append(stage_balance)
    assert torch.equal(stream[0], logits)
    assert torch.allclose(sum(balances, torch.zeros(())), balance)


def test_stages_write_the_tensors_of_the_full_model_and_read_back_their_own(spec: ModelSpec, tmp_path: Path) -> None:
    full = dict(hf_tensors(initialised(spec), spec))
    parts = [dict(hf_tensors(initialised(spec, layers), spec)) for layers in STAGE_SPLITS]
    assert [name for part in parts for name in part] == list(full)
    save_file(full, tmp_path / "model.safetensors")
    for layers in STAGE_SPLITS:
        stage, wanted = Decoder(spec, layers), initialised(spec, layers)
        load_hf_weights(stage, tmp_path)
        for (name, ours), theirs in zip(stage.named_parameters(), wanted.parameters(), strict=True):
            assert torch.equal(ours, theirs), name


def test_a_stage_refuses_tensors_that_belong_to_no_stage(tmp_path: Path) -> None:
    tensors = dict(hf_tensors(initialised(DENSE), DENSE)) | {"model.stranger": torch.zeros(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"unexpected: model\.stranger") as caught:
        load_hf_weights(Decoder(DENSE, STAGE_SPLITS[0]), tmp_path)
    assert caught.value.code == "M021"
    assert "layers.2" not in caught.value.what, "tensors of another stage are expected"


def test_a_stage_only_needs_its_own_tensors(tmp_path: Path) -> None:
    tensors = dict(hf_tensors(initialised(DENSE), DENSE))
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    load_hf_weights(Decoder(DENSE, STAGE_SPLITS[0]), tmp_path)
    with pytest.raises(UserError, match=r"missing: model\.norm\.weight"):
        load_hf_weights(Decoder(DENSE, STAGE_SPLITS[1]), tmp_path)
