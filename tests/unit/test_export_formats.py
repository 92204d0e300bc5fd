"""Exports to GGUF, ONNX and torch.export: loaded again, their logits are those of the checkpoint."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from tests.cases import quick_or_slow
from tests.hf_models import save_model
from tests.random_weights import perturb
from tests.unit.test_checkpoint_export import network_of, save, state_of
from trimaran.app import main
from trimaran.core import Mesh, Plan, UserError, parse_recipe
from trimaran.data import ByteTokenizer, load_tokenizer
from trimaran.nets import Network
from trimaran.runs import RunDirectory, create_run
from trimaran.serve import (
    BOUNDS,
    compare_logits,
    graph_module,
    network_logits,
    portable_module,
    quantise_linears,
    read_onnx,
    read_program,
    refuse_difference,
    sample_tokens,
    write_gguf,
    write_onnx,
    write_program,
)

SHAPE = "layers: 2, hidden: 64, heads: 4, kv_heads: 2, ffn: 96, max_seq_len: 128"
EXPERTS = "num_experts: 4, top_k: 2, ffn: 32"
SHARED = "shared_ffn: 32, shared_gate: true, normalize_top_k: false"
MODELS = {
    "llama": f"{{preset: tiny, shape: {{{SHAPE}, tied: true}}}}",
    "qwen2": f"{{preset: tiny, shape: {{{SHAPE}, qkv_bias: true}}}}",
    "qwen3": f"{{preset: tiny, shape: {{{SHAPE}, qk_norm: true}}}}",
    "qwen2_moe": f"{{preset: tiny-moe, shape: {{{SHAPE}, experts: {{{EXPERTS}, {SHARED}}}}}}}",
    "qwen3_moe": f"{{preset: tiny-moe, shape: {{{SHAPE}, qk_norm: true, experts: {{{EXPERTS}, shared_ffn: 0, "
    "shared_gate: false}}}",
}


def new_trained(path: Path, model: str) -> RunDirectory:
    """Return a run with a checkpoint of random weights of this model."""
    recipe = parse_recipe(f"name: small\nmodel: {model}", name="test")
    run = create_run(path, recipe, Plan(mesh=Mesh(), micro_batch=2))
    save(run.checkpoints, state_of(network_of(recipe).module))
    return run


@pytest.fixture
def trained(tmp_path: Path) -> RunDirectory:
    return new_trained(tmp_path / "run", MODELS["llama"])


def export(capsys: Any, run: RunDirectory, *options: str, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["export", str(run.path), *options, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("model", MODELS)
def test_a_gguf_file_has_the_logits_of_the_checkpoint(model: str, tmp_path: Path, capsys: Any) -> None:
    gguf = pytest.importorskip("gguf")
    run = new_trained(tmp_path / "run", MODELS[model])
    facts = export(capsys, run, "--to", "gguf")
    assert facts["check"]["relative_difference"] <= BOUNDS["fp32"]
    assert facts["check"]["same_choice"] == 1.0
    reader = gguf.GGUFReader(Path(facts["path"]) / "model.gguf")
    assert reader.fields["general.architecture"].contents() == model.replace("_", "")
    assert reader.fields["general.name"].contents() == "small"
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert (tokens[ord("a")], tokens[ord(" ")], len(tokens)) == (
        "a",
        "\u0120",
        network_of(run.read_recipe()).vocabulary,
    )


@pytest.mark.parametrize(
    "kind",
    quick_or_slow(["fp16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"], {"bf16", "q8_0", "q4_1"}.__contains__),
)
def test_a_rounded_gguf_file_is_within_its_bound(kind: str, trained: RunDirectory, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("gguf")
    whole = export(capsys, trained, "--to", "gguf", "--no-check")
    assert "check" not in whole
    option = "--dtype" if kind in ("fp16", "bf16") else "--quantise"
    facts = export(capsys, trained, "--to", "gguf", option, kind, "--out", str(tmp_path / kind))
    assert 0 < facts["check"]["relative_difference"] <= facts["check"]["bound"] == BOUNDS[kind]
    assert facts["bytes"] < 0.7 * whole["bytes"]


def test_transformers_reads_our_gguf_files(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("gguf")
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  it takes seconds to import

    # A config that transformers makes of a file has the default size of a head: hidden / heads.
    for model in ("llama", "qwen2"):
        run = new_trained(tmp_path / model, MODELS[model])
        folder = export(capsys, run, "--to", "gguf", "--no-check")["path"]
        theirs = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32)
        ours = network_logits(network_of(run.read_recipe()))

        @torch.no_grad()
        def logits(tokens: torch.Tensor, theirs: Any = theirs) -> torch.Tensor:
            return theirs(input_ids=tokens).logits

        found = compare_logits(ours, logits, sample_tokens(257, 64), precision="fp32")
        assert found.relative_difference <= BOUNDS["fp32"], model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp32", "fp16"])
@pytest.mark.parametrize("model", MODELS)
def test_llama_cpp_computes_the_same_with_our_gguf_files(model: str, kind: str, tmp_path: Path) -> None:
    """Keys and values in fp32, so that only the weights of an fp16 file are rounded."""
    llama_cpp = pytest.importorskip("llama_cpp")
    network = network_of(parse_recipe(f"name: small\nmodel: {MODELS[model]}", name="test"))
    torch.manual_seed(3)
    perturb(network.module)
    network.module.eval()
    write_gguf(network, ByteTokenizer(), tmp_path / "model.gguf", name="small", kind=kind)
    theirs = llama_cpp.Llama(str(tmp_path / "model.gguf"), n_ctx=128, n_threads=1, logits_all=True, verbose=False,
                             type_k=0, type_v=0)  # fmt: skip
    tokens = np.random.default_rng(0).integers(3, 250, 24).tolist()
    theirs.eval(tokens)
    for _ in range(24):  # greedy tokens of llama.cpp
        tokens.append(int(np.argmax(theirs.scores[len(tokens) - 1])))
        theirs.eval(tokens[-1:])
    found = torch.from_numpy(np.array(theirs.scores[: len(tokens) - 1]))
    theirs.close()
    with torch.no_grad():
        ours = network_logits(network)(torch.tensor([tokens[:-1]]))[0]
    assert float((found - ours).norm() / ours.norm()) < (1e-5 if kind == "fp32" else 5e-3)
    if kind == "fp32":
        assert ours[23:].argmax(-1).tolist() == tokens[24:]


def test_a_hugging_face_model_with_scaled_positions_becomes_a_gguf_file(tmp_path: Path, capsys: Any) -> None:
    gguf = pytest.importorskip("gguf")
    run = hf_run("llama", tmp_path)
    facts = export(capsys, run, "--to", "gguf")
    assert facts["check"]["relative_difference"] <= BOUNDS["fp32"]
    names = [each.name for each in gguf.GGUFReader(Path(facts["path"]) / "model.gguf").tensors]
    assert "rope_freqs.weight" in names


def hf_run(name: str, tmp_path: Path) -> RunDirectory:
    """Return a run with a checkpoint of a model of transformers."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    folder = save_model(name, tmp_path / "origin")
    recipe = parse_recipe(
        f"name: small\nmodel: {{family: hf, path: {folder}}}\ndata: {{tokenizer: bytes}}", name="test"
    )
    run = create_run(tmp_path / "run", recipe, Plan(mesh=Mesh(), micro_batch=2))
    save(run.checkpoints, state_of(AutoModelForCausalLM.from_pretrained(folder)))
    return run


def test_what_a_format_cannot_hold_is_refused(tmp_path: Path, trained: RunDirectory, capsys: Any) -> None:
    pytest.importorskip("gguf")
    gpt2 = hf_run("gpt2", tmp_path / "gpt2")
    error = export(capsys, gpt2, "--to", "gguf", code=2)["error"]
    assert (error["code"], "gpt2" in error["what"]) == ("K070", True)
    error = export(capsys, gpt2, "--quantise", "int8", code=2)["error"]  # its layers are of transformers' own class
    assert (error["code"], error["where"]) == ("K070", "--quantise")
    for family, source in (("vlm", "shapes"), ("perception", "scenes")):
        recipe = parse_recipe(f"name: other\nmodel: {{family: {family}}}\ndata: {{source: {source}}}", name="test")
        other = create_run(tmp_path / family, recipe, Plan(mesh=Mesh(), micro_batch=2))
        for options in (("--to", "gguf"), ("--to", "onnx"), ("--to", "torch-export"), ("--quantise", "int8")):
            assert export(capsys, other, *options, code=2)["error"]["code"] == "K070"
    for options in (
        ("--to", "dcp", "--dtype", "bf16"),
        ("--to", "dcp", "--quantise", "int8"),
        ("--to", "onnx", "--quantise", "int8"),
        ("--to", "hf", "--quantise", "q8_0"),
        ("--to", "gguf", "--merge"),
        ("--to", "gguf", "--dtype", "bf16", "--quantise", "q8_0"),
    ):
        assert export(capsys, trained, *options, code=2)["error"]["code"] == "A001"
    assert not (trained.path / "exports").exists()


def test_an_export_that_differs_is_refused(trained: RunDirectory) -> None:
    network = network_of(trained.read_recipe())
    other = network_of(trained.read_recipe())
    with torch.no_grad():
        next(iter(other.module.parameters())).mul_(1.01)
    batches = sample_tokens(network.vocabulary, network.max_seq_len)
    same = compare_logits(network_logits(network), network_logits(network), batches, precision="fp32")
    assert (same.largest_difference, same.relative_difference, same.same_choice) == (0.0, 0.0, 1.0)
    found = compare_logits(network_logits(network), network_logits(other), batches, precision="fp32")
    with pytest.raises(UserError, match="K072"):
        refuse_difference(found, "there")

    def nothing(tokens: torch.Tensor) -> torch.Tensor:
        return torch.full((*tokens.shape, network.vocabulary), torch.nan)

    with pytest.raises(UserError, match="K072"):
        refuse_difference(compare_logits(network_logits(network), nothing, batches, precision="int4"), "there")


def other_shapes(vocabulary: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocabulary, shape, generator=draw) for shape in ((1, 1), (3, 11), (5, 40))]


@pytest.mark.parametrize("model", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_a_torch_export_archive_takes_any_batch_and_length(model: str, tmp_path: Path) -> None:
    network = network_of(parse_recipe(f"model: {MODELS[model].replace('layers: 2', 'layers: 1')}", name="test"))
    network.module.eval()
    write_program(graph_module(network, "here"), tmp_path / "model.pt2", max_seq_len=network.max_seq_len)
    found = compare_logits(network_logits(network), read_program(tmp_path / "model.pt2"),
                           other_shapes(network.vocabulary), precision="fp32")  # fmt: skip
    assert found.relative_difference <= BOUNDS["fp32"]


@pytest.mark.parametrize("model", ["qwen3", pytest.param("qwen2_moe", marks=pytest.mark.slow)])
def test_onnx_runtime_computes_the_same_logits_for_any_batch_and_length(model: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    network = network_of(parse_recipe(f"model: {MODELS[model].replace('layers: 2', 'layers: 1')}", name="test"))
    network.module.eval()
    write_onnx(graph_module(network, "here"), tmp_path / "model.onnx", max_seq_len=network.max_seq_len)
    found = compare_logits(network_logits(network), read_onnx(tmp_path / "model.onnx"),
                           other_shapes(network.vocabulary), precision="fp32")  # fmt: skip
    assert found.relative_difference <= BOUNDS["fp32"]


def test_a_network_is_not_changed_by_its_export(tmp_path: Path) -> None:
    network: Network = network_of(parse_recipe(f"model: {MODELS['qwen3_moe']}", name="test"))
    before = {name: each.clone() for name, each in network.module.named_parameters()}
    kinds = [type(each) for each in network.module.modules()]
    portable_module(network)
    assert [type(each) for each in network.module.modules()] == kinds
    assert all(torch.equal(each, before[name]) for name, each in network.module.named_parameters())


@pytest.mark.parametrize(
    ("to", "width"),
    [
        ("hf", "int8"),
        ("hf", "int4"),
        pytest.param("torch-export", "int8", marks=pytest.mark.slow),
        pytest.param("torch-export", "int4", marks=pytest.mark.slow),
    ],
)
def test_quantised_weights_are_within_their_bound(to: str, width: str, trained: RunDirectory, capsys: Any) -> None:
    pytest.importorskip("torchao")
    facts = export(capsys, trained, "--to", to, "--quantise", width)
    assert 0 < facts["check"]["relative_difference"] <= facts["check"]["bound"] == BOUNDS[width]
    assert Path(facts["path"]).name.endswith(f"{to}-{width}")


@pytest.mark.parametrize("width", ["int8", "int4"])
def test_linear_layers_are_quantised_as_plain_tensors(width: Any) -> None:
    pytest.importorskip("torchao")
    network = network_of(parse_recipe(f"model: {MODELS['qwen2']}", name="test"))
    module = graph_module(network, "here")
    assert quantise_linears(module, width) == 14
    with torch.no_grad():
        found = compare_logits(network_logits(network), module, sample_tokens(257, 64), precision=width)
    assert 0 < found.relative_difference <= BOUNDS[width]
    whole = sum(each.nbytes for each in network.module.layers.parameters())  # pyrefly: ignore[missing-attribute]
    held = [*module.module.layers.parameters(), *module.module.layers.buffers()]  # pyrefly: ignore[missing-attribute]
    assert {type(each) for each in held} <= {torch.Tensor, torch.nn.Parameter}
    assert sum(each.nbytes for each in held) < (0.32 if width == "int8" else 0.22) * whole


def test_a_model_card_says_where_the_weights_come_from(trained: RunDirectory, capsys: Any) -> None:
    facts = export(capsys, trained, "--no-check")
    card = (Path(facts["path"]) / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "transformers"
    assert yaml.safe_load(front)["pipeline_tag"] == "text-generation"
    for part in ("# small", "the checkpoint of step 7", "## Training", "## Versions", "torch ", "## Recipe",
                 "hidden: 64", "one device", f'"{Path(facts["path"]).name}"', "trimaran serve"):  # fmt: skip
        assert part in text


def test_the_tokenizer_goes_into_a_gguf_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from trimaran.serve import gguf_tokenizer  # noqa: PLC0415

    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False, initial_alphabet=alphabet
    )
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.train_from_iterator(["the cat and the hat and the rat"] * 4, trainer)
    bpe.save(str(tmp_path / "tokenizer.json"))
    written = gguf_tokenizer(load_tokenizer(str(tmp_path / "tokenizer.json")), 320)
    assert (written.model, written.pre, written.left_out) == ("gpt2", "gpt-2", "")
    assert written.tokens[bpe.token_to_id("\u0120the")] == "\u0120the"
    assert written.kinds[bpe.token_to_id("<|endoftext|>")] == "CONTROL"
    assert written.kinds[319] == "UNUSED"
    assert written.special_ids == {"eos": bpe.token_to_id("<|endoftext|>")}
    assert "t h" in written.merges or "h e" in written.merges
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "a": 1}, unk_token="</s>"))
    words.save(str(tmp_path / "words.json"))
    assert "WordLevel" in gguf_tokenizer(load_tokenizer(str(tmp_path / "words.json")), 2).left_out
    assert len(gguf_tokenizer(ByteTokenizer(), 300).tokens) == 300


def test_every_precision_has_a_bound_that_rounding_explains() -> None:
    """A weight that is rounded to a step of 1 / 2 ** bits of its block is off by about half of that."""
    assert np.all(np.diff([BOUNDS[kind] for kind in ("fp32", "fp16", "bf16", "q8_0", "q5_0", "q4_0")]) > 0)
