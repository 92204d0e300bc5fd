"""Multi-token prediction: loss and gradients of a plain implementation, weights in and out, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.prediction_models import IGNORED, PlainPrediction, save_predicting, write_predicting
from trimaran.checkpoint import write_hf_folder
from trimaran.core import ModelSection, Plan, Recipe, UserError
from trimaran.models import ModelSpec, outline_for, spec_of, split_outline
from trimaran.nets import Decoder, Network, labels_ahead, network_of, tokens_ahead
from trimaran.planner import check_axes
from trimaran.train import LanguageObjective, build_loss_function

WEIGHT = 0.3
LENGTHS = (9, 1, 2, 12)  # of the documents in a row


def section_of(folder: Path, ahead: int, **fields: Any) -> ModelSection:
    prediction = {"layers": ahead, "weight": WEIGHT} if ahead else None
    shape = {"experts": {"balance": 0.0}}
    return ModelSection.model_validate(
        {"path": str(folder), "shape": shape, "multi_token_prediction": prediction} | fields
    )


def open_network(folder: Path, ahead: int) -> Network:
    spec = spec_of(section_of(folder, ahead))
    assert spec is not None
    network = network_of(spec)
    network.load(folder)
    return network


def batch(rows: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(1)
    length = sum(LENGTHS)
    tokens = torch.randint(0, 320, (rows, length))
    documents = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).expand(rows, -1)
    last = torch.cat([documents[:, 1:] != documents[:, :-1], torch.zeros(rows, 1, dtype=torch.bool)], dim=1)
    labels = torch.cat([tokens[:, 1:], torch.randint(0, 320, (rows, 1))], dim=1).masked_fill(last, IGNORED)
    labels[-1, 4] = IGNORED  # a target that the data left out
    return {"tokens": tokens, "labels": labels, "documents": documents.contiguous()}


def plain_sums(plain: PlainPrediction, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return the summed losses of all documents, each computed alone."""
    totals = [torch.zeros(())] * (1 + plain.ahead)
    for tokens, labels in zip(inputs["tokens"], inputs["labels"], strict=True):
        for part, targets in zip(tokens.split(LENGTHS), labels.split(LENGTHS), strict=True):
            sums = plain.sums(part, targets)
            totals = [total + each for total, each in zip(totals, [*sums, *[torch.zeros(())] * 9], strict=False)]
    return totals


@pytest.mark.parametrize(("name", "ahead", "loss"), [("deepseek-v3", 2, "logits"), ("deepseek-v3", 1, "fused"),
                                                     ("glm-4.5", 1, "chunked")])  # fmt: skip
def test_loss_and_gradients_equal_a_plain_implementation(tmp_path: Path, name: str, ahead: int, loss: str) -> None:
    plain = save_predicting(name, tmp_path / "model", ahead)
    network, inputs = open_network(tmp_path / "model", ahead), batch()
    num_valid = int((inputs["labels"] != IGNORED).sum())
    expected, *later = plain_sums(plain, inputs)
    ((expected + WEIGHT / ahead * sum(later)) / num_valid).backward()
    network.module.train()
    losses, extra = build_loss_function(LanguageObjective(), network, Plan.model_validate({"loss": loss}))(inputs)
    ((losses.total + extra) / num_valid).backward()
    assert losses.total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert extra.item() == pytest.approx(WEIGHT / ahead * sum(each.item() for each in later), rel=1e-5)
    assert isinstance(network.module, Decoder)
    sums = network.module.take_later_sums()
    assert sums[:, 0].tolist() == pytest.approx([each.item() for each in later], rel=1e-5)
    kept = [labels_ahead(inputs["labels"], inputs["documents"], places) for places in range(1, ahead + 1)]
    assert sums[:, 1].tolist() == [int((each != IGNORED).sum()) for each in kept]
    theirs, ours = _disk_gradients(plain, tmp_path / "gradients"), _gradients(network)
    assert theirs.keys() == ours.keys()
    for key, gradient in theirs.items():
        difference = (ours[key] - gradient).norm() / gradient.norm().clamp(min=1e-6)
        assert difference < 1e-5, f"the gradient of {key} differs by {difference:.1e}"


def _disk_gradients(plain: PlainPrediction, folder: Path) -> dict[str, Tensor]:
    with torch.no_grad():
        for each in plain.parameters():
            each.copy_(torch.zeros_like(each) if each.grad is None else each.grad)
    tensors = write_predicting(plain, folder)
    return {name: each for name, each in tensors.items() if not name.endswith("e_score_correction_bias")}


def _gradients(network: Network) -> dict[str, Tensor]:
    with torch.no_grad():
        for each in network.module.parameters():
            assert each.grad is not None
            each.copy_(each.grad)
    return {name: each for name, each in network.disk_tensors() if not name.endswith("e_score_correction_bias")}


def test_no_later_token_is_of_another_document() -> None:
    tokens = torch.tensor([[10, 11, 12, 20, 30, 31, 32]])
    documents = torch.tensor([[0, 0, 0, 1, 2, 2, 2]])
    labels = torch.tensor([[11, 12, IGNORED, IGNORED, 31, 32, 33]])
    assert tokens_ahead(tokens, documents, 1).tolist() == [[11, 12, 12, 20, 31, 32, 32]]
    assert tokens_ahead(tokens, documents, 2).tolist() == [[12, 12, 12, 20, 32, 32, 32]]
    assert labels_ahead(labels, documents, 1).tolist() == [[12, *[IGNORED] * 3, 32, 33, IGNORED]]
    assert labels_ahead(labels, documents, 2).tolist() == [[*[IGNORED] * 4, 33, *[IGNORED] * 2]]
    assert labels_ahead(labels, None, 5).tolist() == [[32, 33, *[IGNORED] * 5]]


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-4.5"])
def test_weights_are_written_as_they_were_read(tmp_path: Path, name: str) -> None:
    save_predicting(name, tmp_path / "model", 2)
    network = open_network(tmp_path / "model", 2)
    write_hf_folder(tmp_path / "out", network.disk_config(), network.disk_tensors(), origin=None,
                    add_files=lambda _: None)  # fmt: skip
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 2
    read, written = (load_file(next((tmp_path / each).glob("*.safetensors"))) for each in ("model", "out"))
    assert read.keys() == written.keys()
    assert all(torch.equal(read[key], each) for key, each in written.items())
    whole = spec_of(section_of(tmp_path / "out", 2))
    assert isinstance(whole, ModelSpec)
    assert replace(whole, name="model") == network.spec
    # Without the option the same folder is the decoder alone, as transformers loads it.
    alone = open_network(tmp_path / "out", 0)
    inputs = batch(1)
    logits = [each.module.eval()(tokens=inputs["tokens"])[0] for each in (network, alone)]
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=0)


def test_outline_counts_the_parameters_and_flops_of_the_layers(tmp_path: Path) -> None:
    save_predicting("deepseek-v3", tmp_path, 2)
    with_layers, without = (outline_for(section_of(tmp_path, ahead)) for ahead in (2, 0))
    network = open_network(tmp_path, 2)
    num_parameters = sum(each.numel() for each in network.module.parameters())
    assert with_layers.num_parameters == num_parameters
    spec = spec_of(section_of(tmp_path, 2))
    assert spec is not None
    assert spec.num_parameters == num_parameters  # pyrefly: ignore[missing-attribute]
    layer = with_layers.main.runs[-1][0]
    more = 2 * (with_layers.block_flops(with_layers.main, layer, 64) + without.head_flops(64))
    assert with_layers.training_flops(64) == pytest.approx(without.training_flops(64) + more)


@pytest.mark.parametrize(("fields", "reason"), [
    ({"family": "hf", "shape": {}}, "the family hf has no layers"),
    ({"adapter": {"rank": 4}}, "an adapter trains no new layers"),
    ({"path": None, "preset": "tiny", "shape": {}}, "tiny has no layers"),
])  # fmt: skip
def test_models_without_such_layers_are_refused(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    save_predicting("deepseek-v3", tmp_path)
    with pytest.raises(UserError, match=reason) as raised:
        spec_of(section_of(tmp_path, 1, **fields))
    assert raised.value.code == "M085"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"engine": "deepspeed"}, "P120"),
        ({"mesh": {"pp": 2}, "pipeline": {"stages": (4, 1)}}, "P121"),
        ({"mesh": {"pp": 2}, "pipeline": {"schedule": "zero-bubble"}}, "P122"),
        ({"mesh": {"pp": 2}, "pipeline": {"stages": (2, 2)}}, "P011"),
        ({"mesh": {"pp": 5}}, "P011"),
    ],
)
def test_plans_that_cannot_train_the_layers_are_refused(tmp_path: Path, fields: dict[str, Any], code: str) -> None:
    save_predicting("deepseek-v3", tmp_path, 2)
    section = section_of(tmp_path, 2)
    plan, recipe = Plan.model_validate(fields | {"grad_accum": 8}), Recipe(model=section)
    with pytest.raises(UserError) as raised:
        check_axes(plan, recipe, spec_of(section))
    assert raised.value.code == code


def test_stages_are_split_with_the_layers_in_the_last_one(tmp_path: Path) -> None:
    save_predicting("deepseek-v3", tmp_path, 2)
    outline = outline_for(section_of(tmp_path, 2))
    splits = [split_outline(outline, num_stages, seq_len=32) for num_stages in (1, 2, 3, 4)]
    assert [sum(each) for each in splits] == [5] * 4
    assert splits[0] == (5,)
    assert splits[3] == (1, 1, 1, 2)
    assert all(each[-1] >= 2 for each in splits)
