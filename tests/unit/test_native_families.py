"""Every dense architecture: our decoder computes the logits of transformers, from its files and into them."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

from tests.family_configs import CONFIGS, SMALL, WINDOW
from trimaran.models import (
    PRESETS,
    AttentionSpec,
    Block,
    ModelSpec,
    Rope,
    Yarn,
    outline_from_hf,
    outline_of,
    spec_from_hf,
    spec_to_hf,
)
from trimaran.nets import (
    Attention,
    Decoder,
    KeyValueCache,
    PagedCache,
    PagedExtension,
    decoder_network,
    hf_tensors,
    initialise,
    load_hf_weights,
    rotation_at,
)

GENERATOR = torch.Generator().manual_seed(1)
TOKENS = torch.randint(0, 96, (2, 40), generator=GENERATOR)
LENGTHS = (11, 3, 26)  # documents of one row


@pytest.fixture(scope="module", params=CONFIGS)
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """Return a random model of transformers and the folder it was saved to. Soft caps need eager attention."""
    return saved_model(request.param, tmp_path_factory.mktemp(request.param))


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
    decoder, cache = decoder_of(folder), KeyValueCache()
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


def test_every_parameter_names_the_one_of_transformers_that_holds_it(theirs: tuple[PreTrainedModel, Path]) -> None:
    model, folder = theirs
    spec = read_spec(folder)
    network, expected = decoder_network(spec), dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in network.module.named_parameters(remove_duplicate=False):
        stored = network.hf_parameter(name)
        rows = stored.rows(len(parameter))
        assert stored.parts == 1 or stored.shares[stored.part] == len(parameter)
        assert expected[stored.name][rows].shape == parameter.shape
        assert stored.parts > 1 or expected[stored.name].shape == parameter.shape


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


def paged_extension(cache: PagedCache, lengths: list[int], new: list[int]) -> PagedExtension:
    """Return the extension of sequences, each with 8 pages of 4 tokens, that have `lengths` tokens before it."""
    positions = [torch.arange(length, length + count) for length, count in zip(lengths, new, strict=True)]
    ends = torch.tensor([0, *new]).cumsum(0)
    keys = [length + count for length, count in zip(lengths, new, strict=True)]
    return PagedExtension(
        cache=cache,
        positions=torch.cat(positions)[None],
        slots=torch.cat([each + number * 32 for number, each in enumerate(positions)]),
        page_tables=torch.arange(8 * len(new)).view(len(new), 8),
        context_lengths=torch.tensor(keys),
        query_starts=ends,
        kept=ends[1:] - 1,
        query_lengths=new,
        key_lengths=keys,
        num_decodes=sum(count == 1 for count in new),
    )


@torch.no_grad()
def test_sequences_in_pages_have_the_logits_of_the_whole_sequence(theirs: tuple[PreTrainedModel, Path]) -> None:
    model, folder = theirs
    decoder, cache = decoder_of(folder), PagedCache(16, 4)
    rows, lengths, out = TOKENS[:, :15], [0, 0], torch.empty(0)
    for new in ([9, 5], [1, 8], [1, 1]):
        parts = [row[length : length + count] for row, length, count in zip(rows, lengths, new, strict=True)]
        out = decoder(tokens=torch.cat(parts)[None], extension=paged_extension(cache, lengths, new))[0]
        lengths = [length + count for length, count in zip(lengths, new, strict=True)]
    expected = [model(row[None, :length]).logits[0, -1] for row, length in zip(rows, lengths, strict=True)]
    torch.testing.assert_close(out[0], torch.stack(expected), atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("number", [0, 1])
def test_attention_with_sinks_is_that_of_gpt_oss(number: int) -> None:
    rope: dict[str, object] = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "truncate": False}
    rope |= {"original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0}
    config = GptOssConfig(**SMALL, head_dim=16, sliding_window=WINDOW, rope_parameters=rope)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs, rotary = GptOssAttention(config, number), GptOssRotaryEmbedding(config)
    for parameter in theirs.parameters():
        parameter.normal_(std=0.3)
    block = Block(
        qkv_bias=True,
        rope=Rope(theta=1000.0, factor=4.0, scaling="yarn", original_max_seq_len=16, yarn=Yarn(truncate=False)),
        attention=AttentionSpec(out_bias=True, sinks=True, windows=(WINDOW, 0)),
    )
    spec = ModelSpec(name="oss", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=16, ffn=8, vocab=8,
                     max_seq_len=64, block=block)  # fmt: skip
    ours = Attention(spec, spec.layer(number))
    ours.load_state_dict(theirs.state_dict())
    x, positions = torch.randn(2, 20, 32), torch.arange(20)[None]
    distances = positions[0][:, None] - positions[0]
    hidden = (distances < 0) | (distances >= (WINDOW if number == 0 else 99))
    mask = torch.zeros(20, 20).masked_fill(hidden, float("-inf"))[None, None]
    expected = theirs(x, rotary(x, positions), mask)[0]
    found = ours(x, rotation_at(positions, block.rope, 16), None)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gemma-2-2b", "olmo-2-7b", "command-r7b"])
def test_a_reshaped_preset_starts_neutral_and_is_written_as_its_own_architecture(name: str) -> None:
    small = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "vocab": 64}
    spec = replace(PRESETS[name], **small)
    decoder = Decoder(spec)
    initialise(decoder, seed=0, spec=spec)
    first = decoder.blocks[0].get_parameter("post_attention_layernorm.weight" if "r7b" not in name
                                            else "input_layernorm.weight")  # fmt: skip
    assert torch.equal(first, torch.full_like(first, 0.0 if "gemma" in name else 1.0))
    again = spec_from_hf(spec_to_hf(spec), where="config.json")
    assert [again.layer(number) for number in range(2)] == [spec.layer(number) for number in range(2)]
    assert again.block.norm == spec.block.norm
