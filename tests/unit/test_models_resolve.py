import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trimaran.core import DataSection, ModelSection, UserError
from trimaran.models import (
    PERCEPTION_PRESETS,
    PRESETS,
    VLM_PRESETS,
    ExpertSpec,
    ModelSpec,
    decoder_of,
    language_of,
    outline_for,
    outline_if_known,
    outline_of,
    refuse_freezing,
    spec_of,
    spec_to_hf,
    vision_of,
)

TINY = PRESETS["tiny"]
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 16}
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 28}
LLAVA = {
    "model_type": "llava",
    "vision_config": {"model_type": "clip_vision_model", "patch_size": 7, **VIT},
    "text_config": spec_to_hf(TINY),
}


def shaped(**shape: Any) -> ModelSpec:
    spec = spec_of(ModelSection(shape=shape))
    assert isinstance(spec, ModelSpec)
    return spec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder with a config.json and no weights."""
    (tmp_path / "config.json").write_text(json.dumps(spec_to_hf(TINY)))
    return tmp_path


def test_the_default_model_is_tiny_and_a_preset_gives_its_spec() -> None:
    assert spec_of(ModelSection()) == TINY
    assert spec_of(ModelSection(preset="qwen3-8b")) == PRESETS["qwen3-8b"]


def test_a_spec_says_what_its_model_contains() -> None:
    vlm, scenes = VLM_PRESETS["tiny"], PERCEPTION_PRESETS["tiny"]
    assert [language_of(each) for each in (TINY, vlm, scenes, None)] == [TINY, vlm.language, None, None]
    assert [vision_of(each) for each in (TINY, vlm, scenes, None)] == [None, vlm.vision, None, None]
    assert [decoder_of(each) for each in (TINY, vlm, scenes, None)] == [TINY, None, None, None]


def test_a_mistyped_preset_gets_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"M001.*did you mean 'llama-3-8b'"):
        spec_of(ModelSection(preset="llama3-8b"))


def test_a_path_is_a_folder_or_its_config(folder: Path) -> None:
    wanted = replace(TINY, name=folder.name)
    assert spec_of(ModelSection(path=str(folder))) == wanted
    assert spec_of(ModelSection(path=str(folder / "config.json"))) == wanted
    assert spec_of(ModelSection(path=str(folder), family="hf")) == wanted


def test_an_unsupported_hf_model_has_no_spec(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 32}))
    assert spec_of(ModelSection(path=str(folder), family="hf")) is None
    with pytest.raises(UserError, match="M006"):
        spec_of(ModelSection(path=str(folder)))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('{"model_type": "lla', "M005"),
        ("[1, 2]", "M005"),
        ("[" * 100_000, "M005"),
        ("\xff", "M005"),
        (" " * 10_000_001, "M005"),
    ],
)
def test_a_broken_config_is_a_clear_error(folder: Path, text: str, code: str) -> None:
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError) as caught:
        spec_of(ModelSection(path=str(folder)))
    assert caught.value.code == code


def test_a_missing_folder_and_a_missing_config_are_different_errors(folder: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        spec_of(ModelSection(path=str(folder / "absent")))
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"holds no config\.json"):
        spec_of(ModelSection(path=str(folder)))


@pytest.mark.parametrize(
    ("section", "code"),
    [
        (ModelSection(preset="tiny", path="/tmp"), "M002"),
        (ModelSection(family="hf"), "M002"),
        (ModelSection(family="hf", path="/tmp", shape={"layers": 1}), "M002"),
    ],
)
def test_contradictions_are_refused(section: ModelSection, code: str) -> None:
    with pytest.raises(UserError) as caught:
        spec_of(section)
    assert caught.value.code == code


def test_shape_changes_fields_of_the_spec_its_block_and_its_experts() -> None:
    assert shaped(layers=2, vocab=512) == replace(TINY, layers=2, vocab=512)
    assert shaped(norm_eps=1e-6) == replace(TINY, block=replace(TINY.block, norm_eps=1e-6))
    rope = replace(TINY.block.rope, theta=500.0)
    assert shaped(rope={"theta": 500}) == replace(TINY, block=replace(TINY.block, rope=rope))
    experts = ExpertSpec(num_experts=4, top_k=1, ffn=32)
    assert shaped(experts={"num_experts": 4, "top_k": 1, "ffn": 32}) == replace(
        TINY, block=replace(TINY.block, experts=experts)
    )
    fewer = spec_of(ModelSection(preset="tiny-moe", shape={"experts": {"num_experts": 4}}))
    assert isinstance(fewer, ModelSpec)
    assert fewer.block.experts == replace(PRESETS["tiny-moe"].block.experts or experts, num_experts=4)
    dense = spec_of(ModelSection(preset="tiny-moe", shape={"experts": None}))
    assert isinstance(dense, ModelSpec)
    assert dense.block.experts is None


def test_head_dim_follows_hidden_and_heads_unless_it_is_set() -> None:
    assert shaped(hidden=256) == replace(TINY, hidden=256, head_dim=64)
    assert shaped(hidden=256, head_dim=32) == replace(TINY, hidden=256, head_dim=32)
    assert shaped(heads=8) == replace(TINY, heads=8, head_dim=16)


@pytest.mark.parametrize(
    ("shape", "code", "text"),
    [
        ({"layer": 2}, "M008", "did you mean 'layers'"),
        ({"name": "x"}, "M008", "no field 'name'"),
        ({"experts": {"topk": 2}}, "M008", "did you mean 'top_k'"),
        ({"layers": "2"}, "M009", "'2' is not a whole number"),
        ({"layers": True}, "M009", "True is not a whole number"),
        ({"layers": 0}, "M009", "not between"),
        ({"layers": 10**9}, "M009", "not between"),
        ({"norm_eps": "1e-5"}, "M009", "1.0e-5"),
        ({"rope": {"theta": float("nan")}}, "M009", "nan"),
        ({"rope": {"theta": 10**400}}, "M009", "is not a number"),
        ({"tied": 1}, "M009", "true or false"),
        ({"experts": 8}, "M009", "not a mapping"),
        ({"experts": {"num_experts": 8}}, "M009", "top_k is missing"),
        ({"experts": {"num_experts": 2, "top_k": 3, "ffn": 8}}, "M009", "experts.top_k"),
        ({"heads": 3}, "M009", "do not divide"),
        ({"heads": 0}, "M009", "do not divide"),
        ({"kv_heads": 3}, "M009", "do not divide"),
        ({"head_dim": 31}, "M009", "odd"),
    ],
)
def test_a_wrong_shape_is_named(shape: dict[str, Any], code: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        shaped(**shape)
    assert caught.value.code == code
    assert text in caught.value.what


def test_an_outline_is_of_our_decoder_or_of_the_model_in_the_folder(folder: Path) -> None:
    reshaped = ModelSection(path=str(folder), shape={"layers": 2})
    assert outline_for(reshaped) == outline_of(replace(TINY, name=folder.name, layers=2))
    (folder / "config.json").write_text(json.dumps(GPT2))
    outline = outline_for(ModelSection(path=str(folder), family="hf"))
    assert (outline.name, outline.layers, outline.main.tied) == (folder.name, 2, True)


def test_a_config_without_sizes_is_an_error_or_gives_no_outline(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba", "hidden_size": 32, "vocab_size": 64}))
    section = ModelSection(path=str(folder), family="hf")
    with pytest.raises(UserError, match=r"M011.*layers \(num_hidden_layers \|.*heads \("):
        outline_for(section)
    assert outline_if_known(section) is None
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="M005"):
        outline_if_known(section)


def test_a_section_names_a_preset_a_folder_or_a_config(folder: Path) -> None:
    assert outline_for(ModelSection(preset="qwen3-8b")) == outline_of(PRESETS["qwen3-8b"])
    wanted = replace(outline_of(TINY), name=folder.name)
    for path in (folder, folder / "config.json"):
        assert outline_for(ModelSection(path=str(path))) == wanted
    with pytest.raises(UserError, match=r"M001.*did you mean 'qwen3-8b'"):
        outline_for(ModelSection(preset="qwen-3-8b"))
    with pytest.raises(UserError, match="M004"):
        outline_for(ModelSection(path="models/absent"))


def test_towers_are_frozen_by_name(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(LLAVA))
    section = ModelSection(path=str(folder), family="hf", freeze=("vision", "projector"))
    outline = outline_for(section)
    assert [tower.frozen for tower in outline.towers] == [True, True, False]
    assert outline.trained_parameters == TINY.num_parameters
    with pytest.raises(UserError, match=r"M012.*did you mean 'vision'"):
        outline_for(section.model_copy(update={"freeze": ("vison",)}))
    with pytest.raises(UserError, match=r"M012.*nothing is left to train"):
        outline_for(ModelSection(freeze=("language",)))
    (folder / "config.json").write_text(json.dumps(LLAVA | {"image_token_index": 300}))
    refuse_freezing(section)
    (folder / "config.json").write_text(json.dumps(LLAVA | {"model_type": "gemma3"}))
    with pytest.raises(UserError, match="M014"):
        refuse_freezing(section)
    refuse_freezing(ModelSection())


def test_the_images_of_a_sample_come_from_the_data_section_and_must_fit_into_the_sequence(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(LLAVA))
    section = ModelSection(path=str(folder), family="hf")
    vision, projector, _ = outline_for(section, DataSection(images_per_sample=3)).towers
    assert (vision.positions, projector.positions) == (3 * 17, 3 * 16)
    with pytest.raises(UserError, match=r"M013.*are 48 tokens, and its sequence has 32"):
        outline_for(section, DataSection(images_per_sample=3, seq_len=32))


def test_the_models_package_imports_no_torch() -> None:
    program = "import sys, trimaran.models; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
