"""A decoder in stages: together they are the whole, and each takes from the disk what is its own."""

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
CUTS = (range(2), range(2, 3))
TOKENS = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(1))
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 11, [0] * 16])


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    return SPECS[request.param]


def filled(spec: ModelSpec, layers: range | None = None) -> Decoder:
    module = Decoder(spec, layers)
    initialise(module, seed=5, spec=spec)
    return module


def test_stages_one_after_the_other_are_the_whole(spec: ModelSpec) -> None:
    logits, balance = filled(spec)(tokens=TOKENS, documents=DOCUMENTS)
    stream: tuple[torch.Tensor, ...] = ()
    balances = []
    for layers in CUTS:
        out, of_stage = filled(spec, layers)(*stream, tokens=TOKENS, documents=DOCUMENTS)
        stream = (out,)
        balances.append(of_stage)
    assert torch.equal(stream[0], logits)
    assert torch.allclose(sum(balances, torch.zeros(())), balance)


def test_stages_write_what_the_whole_writes_and_read_their_own_back(spec: ModelSpec, tmp_path: Path) -> None:
    whole = dict(hf_tensors(filled(spec), spec))
    parts = [dict(hf_tensors(filled(spec, layers), spec)) for layers in CUTS]
    assert [name for part in parts for name in part] == list(whole)
    save_file(whole, tmp_path / "model.safetensors")
    for layers in CUTS:
        stage, wanted = Decoder(spec, layers), filled(spec, layers)
        load_hf_weights(stage, tmp_path)
        for (name, ours), theirs in zip(stage.named_parameters(), wanted.parameters(), strict=True):
            assert torch.equal(ours, theirs), name


def test_a_stage_refuses_what_belongs_to_no_stage(tmp_path: Path) -> None:
    tensors = dict(hf_tensors(filled(DENSE), DENSE)) | {"model.stranger": torch.zeros(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"unexpected: model\.stranger") as caught:
        load_hf_weights(Decoder(DENSE, CUTS[0]), tmp_path)
    assert caught.value.code == "M021"
    assert "layers.2" not in caught.value.what, "what another stage holds is nothing unexpected"


def test_a_stage_misses_only_what_it_holds(tmp_path: Path) -> None:
    tensors = dict(hf_tensors(filled(DENSE), DENSE))
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    load_hf_weights(Decoder(DENSE, CUTS[0]), tmp_path)
    with pytest.raises(UserError, match=r"missing: model\.norm\.weight"):
        load_hf_weights(Decoder(DENSE, CUTS[1]), tmp_path)
