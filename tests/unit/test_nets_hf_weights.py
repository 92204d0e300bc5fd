"""Our decoder and transformers compute the same logits from the same files, whichever of them wrote the files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from trimaran.core import UserError
from trimaran.models import ModelSpec, spec_from_hf, spec_to_hf, weight_files
from trimaran.nets import Decoder, hf_tensors, initialise, load_hf_weights

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
LLAMA_3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "llama-tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama-3.1": LlamaConfig(**SMALL, rope_parameters=LLAMA_3),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "qwen2-moe": Qwen2MoeConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=24),
    "one-expert": Qwen3MoeConfig(**SMALL, **EXPERTS | {"num_experts": 1, "num_experts_per_tok": 1, "head_dim": 16}),
    "qwen3-moe": Qwen3MoeConfig(**SMALL, **EXPERTS | {"head_dim": 16}, norm_topk_prob=True),
}
TOKENS = torch.randint(0, 96, (2, 48), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=CONFIGS)
def theirs(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    """Return a random model of transformers and the folder it was saved to."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param], attn_implementation="sdpa").eval()
    perturb(model)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def perturb(module: nn.Module) -> None:
    """Add noise to every parameter, so that no neutral value hides a mistake."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))


def read_spec(folder: Path) -> ModelSpec:
    return spec_from_hf(json.loads((folder / "config.json").read_text()), where="config.json")


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def test_weights_saved_by_transformers_give_its_logits(theirs: tuple[PreTrainedModel, Path]) -> None:
    model, folder = theirs
    ours = Decoder(read_spec(folder))
    load_hf_weights(ours, folder)
    with torch.no_grad():
        logits, _ = ours(tokens=TOKENS)
    assert logits_of(model).std() > 0.3
    torch.testing.assert_close(logits, logits_of(model), atol=1e-5, rtol=1e-5)


def test_weights_that_we_write_load_into_transformers(theirs: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    spec = read_spec(theirs[1])
    ours = Decoder(spec)
    initialise(ours, seed=3, spec=spec)
    perturb(ours)
    folder = tmp_path / "ours"
    write_model(ours, spec, folder)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert type(model) is type(theirs[0])
    with torch.no_grad():
        logits, _ = ours(tokens=TOKENS)
    torch.testing.assert_close(logits, logits_of(model), atol=1e-5, rtol=1e-5)


def embedding_of(module: Decoder) -> nn.Embedding:
    assert module.embed_tokens is not None
    return module.embed_tokens


def write_model(module: Decoder, spec: ModelSpec, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(spec_to_hf(spec)))
    save_file(dict(hf_tensors(module, spec)), folder / "model.safetensors", metadata={"format": "pt"})


SPEC = spec_from_hf(CONFIGS["llama-tied"].to_dict(), where="here")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a folder with a small tied decoder of ours."""
    module = Decoder(SPEC)
    initialise(module, seed=0, spec=SPEC)
    write_model(module, SPEC, tmp_path / "model")
    return tmp_path / "model"


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of the saved file."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors = {name: value for name, value in (tensors | change).items() if value is not None}
    save_file(tensors, folder / "model.safetensors")


def test_a_tied_head_is_neither_written_nor_required(saved: Path) -> None:
    module = Decoder(SPEC)
    assert "lm_head.weight" not in dict(hf_tensors(module, SPEC))
    load_hf_weights(module, saved)
    assert module.lm_head is not None
    assert module.lm_head.weight is embedding_of(module).weight


def test_the_parameter_keeps_its_dtype(saved: Path) -> None:
    module = Decoder(SPEC).to(torch.bfloat16)
    load_hf_weights(module, saved)
    wanted = Decoder(SPEC)
    load_hf_weights(wanted, saved)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    assert torch.equal(embedding_of(module).weight, embedding_of(wanted).weight.bfloat16())


def test_wrong_names_and_shapes_are_one_error_and_no_value_is_written(saved: Path) -> None:
    rewrite(saved, {
        "model.norm.weight": None,
        "model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2),
        "model.layers.0.mlp.up_proj.scales": torch.zeros(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2),
    })  # fmt: skip
    module = Decoder(SPEC)
    before = embedding_of(module).weight.clone()
    with pytest.raises(UserError, match="M021") as caught:
        load_hf_weights(module, saved)
    for part in (
        "missing: model.norm.weight",
        "up_proj.weight [2, 2]",
        "unexpected: model.layers.0.mlp.up_proj.scales",
    ):
        assert part in caught.value.what
    assert "inv_freq" not in caught.value.what
    assert torch.equal(embedding_of(module).weight, before)


def test_shards_are_read_through_their_index(saved: Path) -> None:
    with safe_open(saved / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    (saved / "model.safetensors").unlink()
    files = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for part in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == part}, saved / part)
    (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    module = Decoder(SPEC)
    load_hf_weights(module, saved)
    assert torch.equal(embedding_of(module).weight, tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "absent.safetensors"])
def test_an_index_names_only_files_beside_it(saved: Path, name: str) -> None:
    (saved.parent / "elsewhere.safetensors").touch()
    (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(UserError, match="M022"):
        load_hf_weights(Decoder(SPEC), saved)


def test_a_damaged_file_is_a_clear_error(saved: Path) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(UserError, match="M022"):
        load_hf_weights(Decoder(SPEC), saved)


def test_pickles_and_folders_without_weights_are_refused(tmp_path: Path) -> None:
    assert weight_files(tmp_path) == []
    with pytest.raises(UserError, match="holds no weights"):
        load_hf_weights(Decoder(SPEC), tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    with pytest.raises(UserError, match="M020") as caught:
        load_hf_weights(Decoder(SPEC), tmp_path)
    assert "save_pretrained" in caught.value.fix
