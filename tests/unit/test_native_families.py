"""Every dense architecture: our decoder computes the logits of transformers, from its files and into them."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.family_configs import CONFIGS
from trimaran.models import ModelSpec, outline_from_hf, outline_of, spec_from_hf, spec_to_hf
from trimaran.nets import Decoder, hf_tensors, load_hf_weights
from trimaran.nets.key_value_cache import KeyValueCache

GENERATOR = torch.Generator().manual_seed(1)
TOKENS = torch.randint(0, 96, (2, 40), generator=GENERATOR)
LENGTHS = (11, 3, 26)  # documents of one row


@pytest.fixture(params=CONFIGS)
def theirs(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    """Return a random model of transformers and the folder it was saved to. Soft caps need eager attention."""
    return saved_model(request.param, tmp_path)


def saved_model(name: str, folder: Path) -> tuple[PreTrainedModel, Path]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that no neutral value hides a mistake
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model, folder


def read_spec(folder: Path) -> ModelSpec:
    return spec_from_hf(json.loads((folder / "config.json").read_text()), where="config.json")


def decoder_of(folder: Path) -> Decoder:
    decoder = Decoder(read_spec(folder))
    load_hf_weights(decoder, folder)
    return decoder


@torch.no_grad()
def test_weights_saved_by_transformers_give_its_logits(theirs: tuple[PreTrainedModel, Path]) -> None:
    model, folder = theirs
    expected = model(TOKENS).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(decoder_of(folder)(tokens=TOKENS)[0], expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_documents_of_a_row_are_computed_as_if_alone(theirs: tuple[PreTrainedModel, Path]) -> None:
    model, folder = theirs
    row = TOKENS[:1]
    documents = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
    found = decoder_of(folder)(tokens=row, documents=documents)[0]
    alone = [model(each).logits for each in row.split(LENGTHS, dim=1)]
    torch.testing.assert_close(found, torch.cat(alone, dim=1), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_tokens_after_a_cache_have_the_logits_of_the_whole_sequence(theirs: tuple[PreTrainedModel, Path]) -> None:
    model, folder = theirs
    decoder, cache = decoder_of(folder), KeyValueCache(2)
    last: list[Tensor] = []
    bounds = [0, 9, 10, 14, 15]  # within the original length of LongRoPE
    for start, stop in pairwise(bounds):
        tokens = TOKENS[:, start:stop]
        last.append(decoder(tokens=tokens, extension=cache.extend(tokens))[0])
    expected = model(TOKENS[:, :15]).logits[:, [stop - 1 for stop in bounds[1:]]]
    torch.testing.assert_close(torch.cat(last, dim=1), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_written_files_equal_those_that_were_read(theirs: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    model, folder = theirs
    decoder = decoder_of(folder)
    written, again = dict(hf_tensors(decoder, decoder.spec)), tmp_path / "again"
    read = load_file(folder / "model.safetensors")
    read = {name: each for name, each in read.items() if name != "lm_head.weight" or not decoder.spec.tied}
    assert written.keys() == read.keys()
    assert all(torch.equal(written[name], read[name]) for name in read)
    again.mkdir()
    (again / "config.json").write_text(json.dumps(spec_to_hf(decoder.spec)))
    save_file(written, again / "model.safetensors", metadata={"format": "pt"})
    loaded, report = AutoModelForCausalLM.from_pretrained(again, attn_implementation="eager", output_loading_info=True)
    assert type(loaded) is type(model)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits, atol=1e-6, rtol=1e-6)


def test_the_outlines_count_the_parameters_of_the_module(theirs: tuple[PreTrainedModel, Path]) -> None:
    model, folder = theirs
    spec, config = read_spec(folder), json.loads((folder / "config.json").read_text())
    count = sum(each.numel() for each in model.parameters())
    outlines = outline_of(spec), outline_from_hf(config, where="config.json", name="model")
    assert [spec.num_parameters, *(each.num_parameters for each in outlines)] == [count] * 3
    windows = [[getattr(step.block, "window", None) for step in each.steps()] for each in outlines]
    assert windows[0] == windows[1]
    assert outlines[0].main.bare_head == outlines[1].main.bare_head


@pytest.mark.parametrize("name", ["gemma2", "phi3", "cohere2"])
def test_stages_read_and_write_their_own_layers(name: str, tmp_path: Path) -> None:
    _, folder = saved_model(name, tmp_path)
    spec = read_spec(folder)
    written: dict[str, Tensor] = {}
    for layers in (range(1), range(1, 3)):
        stage = Decoder(spec, layers)
        load_hf_weights(stage, folder)
        written |= dict(hf_tensors(stage, spec))
    read = load_file(folder / "model.safetensors")
    assert all(torch.equal(written[each], read[each]) for each in written)
    assert set(read) - set(written) <= {"lm_head.weight"}
