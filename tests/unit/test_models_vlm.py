"""Specs of vision-language models: from presets, folders and recipes, and their number of parameters."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen2VLConfig

from trimaran.core import DataSection, ModelSection, UserError
from trimaran.models import (
    VLM_PRESETS,
    ImageLimits,
    VlmSpec,
    disk_form,
    module_names,
    outline_for,
    outline_from_hf,
    spec_of,
    vlm_from_disk,
    vlm_outline,
    vlm_to_disk,
)
from trimaran.nets import network_of

TINY = VLM_PRESETS["tiny"]
PUBLISHED = {  # parameters, from the published safetensors
    "qwen2-vl-2b": 2_208_985_600,
    "qwen2-vl-7b": 8_291_375_616,
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
    # Without the last layer of CLIP and its last norm, which LLaVA has on disk but does not use.
    "llava-1.5-7b": 7_063_427_072 - 12_596_224 - 2_048,
    "internvl-26b": 25_514_186_112,
    "qwen3-vl-4b": 4_437_815_808,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen3-vl-30b-a3b": 31_070_754_032,
}
FORMS = {
    "tiny": "qwen2_vl",
    "tiny-tiled": "trimaran_vlm",
    "qwen2-vl-2b": "qwen2_vl",
    "qwen2-vl-7b": "qwen2_vl",
    "qwen2.5-vl-3b": "qwen2_5_vl",
    "qwen2.5-vl-7b": "qwen2_5_vl",
    "llava-1.5-7b": "llava",
    "qwen3-vl-4b": "qwen3_vl",
    "qwen3-vl-8b": "qwen3_vl",
    "qwen3-vl-30b-a3b": "qwen3_vl_moe",
    "internvl-26b": "internvl",
}


def shaped(**shape: Any) -> VlmSpec:
    spec = spec_of(ModelSection(family="vlm", shape=shape))
    assert isinstance(spec, VlmSpec)
    return spec


@pytest.mark.parametrize("name", VLM_PRESETS)
def test_a_preset_has_the_parameters_and_module_names_of_its_module(name: str) -> None:
    spec = VLM_PRESETS[name]
    with torch.device("meta"):
        module = network_of(spec).module
    assert sum(each.numel() for each in module.parameters()) == spec.num_parameters
    assert vlm_outline(spec, ImageLimits()).num_parameters == spec.num_parameters
    assert set(module_names(spec)) == {each for each, _ in module.named_modules() if each}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    assert VLM_PRESETS[name].num_parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", VLM_PRESETS)
def test_a_spec_survives_a_round_trip_through_its_config(name: str) -> None:
    spec = VLM_PRESETS[name]
    assert disk_form(spec) == FORMS[name]
    again = vlm_from_disk(json.loads(json.dumps(vlm_to_disk(spec))), where="config.json")
    table = spec.vision.tile_side if FORMS[name] in ("llava", "internvl") else spec.vision.ends.table
    wanted = replace(
        spec,
        name=again.name,
        vision=replace(spec.vision, ends=replace(spec.vision.ends, table=table)),
        language=replace(spec.language, name=again.language.name),
    )
    if name == "tiny":  # the image sizes belong to the processor and are not in config.json
        wanted = replace(wanted, min_pixels=again.min_pixels, max_pixels=again.max_pixels)
    assert again == wanted


@pytest.mark.parametrize("name", ["qwen2-vl-7b", "qwen2.5-vl-7b", "llava-1.5-7b", "internvl-26b", "qwen3-vl-4b"])
def test_transformers_builds_a_model_of_the_same_size_from_our_config(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(vlm_to_disk(VLM_PRESETS[name])))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path))
    last_norm = 2048 if name == "llava-1.5-7b" else 0
    assert sum(each.numel() for each in model.parameters()) == VLM_PRESETS[name].num_parameters + last_norm


@pytest.mark.parametrize(
    "name", ["qwen2-vl-2b", "qwen2-vl-7b", "qwen2.5-vl-3b", "qwen2.5-vl-7b", "llava-1.5-7b", "internvl-26b"]
)
def test_our_model_has_the_same_outline_as_the_one_of_transformers(name: str) -> None:
    spec, images = VLM_PRESETS[name], ImageLimits(count=3, size=None if name.startswith("llava") else 700)
    ours = vlm_outline(spec, images)
    theirs = outline_from_hf(vlm_to_disk(spec), where="config.json", name=name, images=images)
    if name.startswith("llava"):  # it has an unused norm
        first = theirs.towers[0]
        theirs = replace(theirs, towers=(replace(first, extras=first.extras - 2048), *theirs.towers[1:]))
    assert [(each.name, each.parameters, each.positions, each.segment) for each in ours.towers] == [
        (each.name, each.parameters, each.positions, each.segment) for each in theirs.towers
    ]
    assert ours.training_flops(4096) == pytest.approx(theirs.training_flops(4096), rel=1e-6)


def test_the_images_of_the_data_section_set_the_positions_of_the_towers() -> None:
    section, data = ModelSection(family="vlm", freeze=("vision",)), DataSection(images_per_sample=3, image_size=64)
    vision, projector, language = outline_for(section, data).towers
    assert (vision.positions, vision.segment, vision.frozen) == (3 * 64, 64, True)
    assert (projector.positions, projector.frozen, projector.layers) == (3 * 16, False, 1)
    assert (language.name, language.frozen) == ("language", False)
    with pytest.raises(UserError, match="the images of a sample are 48 tokens, and its sequence has 32"):
        outline_for(section, DataSection(images_per_sample=3, image_size=64, seq_len=32))
    tiled = outline_for(ModelSection(family="vlm", preset="tiny-tiled"), DataSection(image_size=96))
    assert tiled.towers[0].positions == 5 * 37, "four tiles and a thumbnail, each with its class token"


def test_a_spec_gives_the_image_rules_of_the_data() -> None:
    rules = TINY.images()
    assert (rules.patch, rules.merge, rules.image_token, rules.before, rules.after) == (8, 2, 257, (258,), (259,))
    assert (rules.variant, rules.positions, rules.min_pixels, rules.max_pixels) == ("native", "grid", 1024, 9216)
    tiled = VLM_PRESETS["tiny-tiled"].images()
    assert (tiled.variant, tiled.tile, tiled.max_tiles, tiled.positions) == ("tiled", 48, 4, "line")


def test_the_shape_of_each_tower_can_be_changed() -> None:
    spec = shaped(vision={"layers": 2, "block": {"gated": True}}, language={"hidden": 64, "norm_eps": 1e-5})
    assert spec.vision == replace(TINY.vision, layers=2, block=replace(TINY.vision.block, gated=True))
    assert (spec.language.hidden, spec.language.head_dim, spec.language.block.norm_eps) == (64, 16, 1e-5)
    assert spec.sections == (2, 3, 3), "they follow the head size unless they are set"
    assert shaped(vision={"full_layers": [1, 2], "window": 32}).vision.full_layers == (1, 2)


@pytest.mark.parametrize(
    ("shape", "code", "what"),
    [
        ({"vison": {}}, "M008", "a shape has no field 'vison' (did you mean 'vision'?)"),
        ({"vision": {"layer": 2}}, "M008", "a shape has no field 'layer' (did you mean 'layers'?)"),
        ({"vision": {"variant": "round"}}, "M009", "'round' is not one of native, tiled"),
        ({"vision": 3}, "M009", "3 is not a mapping of fields"),
        ({"language": 3}, "M009", "3 is not a mapping of fields"),
        ({"vision": {"full_layers": 3}}, "M009", "3 is not a list"),
        ({"vision": {"heads": 5}}, "M009", "vision.heads: 5 heads do not divide hidden 96"),
        (
            {"vision": {"hidden": 72}},
            "M009",
            "vision.heads: 18 features per head do not split into pairs for row and column",
        ),
        ({"vision": {"variant": "tiled", "tile": 40}}, "M009", "vision.tile: 40 pixels are not a multiple of patch"),
        ({"vision": {"tile": 48}}, "M009", "vision.variant: only a tiled tower has"),
        ({"vision": {"window": 8}}, "M009", "vision.window: 8 pixels are less than patch x merge, 16"),
        ({"vision": {"ends": {"std": [1.0, 0.0, 1.0]}}}, "M009", "vision.ends.std: [1.0, 0.0, 1.0] must be above 0"),
        ({"vision": {"ends": {"std": [1.0]}}}, "M009", "[1.0] is not a list of 3 values"),
        ({"sections": [4, 4, 4]}, "M009", "sections: [4, 4, 4] do not add up to the 16 pairs"),
        ({"image_token": 320}, "M009", "image_token: 320 is not between 0 and 319"),
        ({"language": {"kv_heads": 3}}, "M009", "kv_heads: 3 key-value heads do not divide 4 heads"),
    ],
)
def test_impossible_shapes_are_refused(shape: dict[str, Any], code: str, what: str) -> None:
    with pytest.raises(UserError) as caught:
        shaped(**shape)
    assert caught.value.code == code
    assert what in caught.value.what


def test_an_unknown_preset_gets_the_nearest_as_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"there is no preset 'qwen2-vl-3b' \(did you mean 'qwen2") as caught:
        spec_of(ModelSection(family="vlm", preset="qwen2-vl-3b"))
    assert caught.value.code == "M001"


CLIP = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
LLAVA = {"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": CLIP}


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (
            {"model_type": "gemma3"},
            "model_type is 'gemma3'; it supports qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, llava, ",
        ),
        ({}, "model_type is None"),
        (LLAVA | {"vision_config": {"model_type": "siglip_vision_model"}}, "its vision is 'siglip_vision_model'"),
        (LLAVA | {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy is 'full'"),
        (LLAVA | {"vision_feature_layer": [-2, -1]}, "vision_feature_layer is [-2, -1]"),
        (LLAVA | {"multimodal_projector_bias": False}, "multimodal_projector_bias is False"),
        (LLAVA | {"vision_config": CLIP | {"hidden_act": "relu"}}, "hidden_act of its vision is 'relu'"),
        (
            vlm_to_disk(TINY) | {"text_config": vlm_to_disk(TINY)["text_config"] | {"rope_scaling": {"type": "yarn"}}},
            "rope_type is 'yarn'",
        ),
    ],
)
def test_unsupported_models_are_refused_with_the_supported_ones(config: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError) as caught:
        vlm_from_disk(config, where="config.json")
    assert caught.value.code == "M034"
    assert what in caught.value.what


def test_an_unsupported_language_model_is_refused_as_a_decoder_is() -> None:
    config = vlm_to_disk(TINY)
    with pytest.raises(UserError, match="attention_dropout is") as caught:
        vlm_from_disk(config | {"text_config": config["text_config"] | {"attention_dropout": 0.5}}, where="x")
    assert caught.value.code == "M006"


@pytest.mark.parametrize("shape", [3, {"vision": 1}, {"vision": {"layers": "two"}}, {"name": "a"}])
def test_a_damaged_config_of_our_own_is_refused(shape: Any) -> None:
    with pytest.raises(UserError) as caught:
        vlm_from_disk({"model_type": "trimaran_vlm", "shape": shape}, where="config.json")
    assert caught.value.code == "M007"


def test_sparse_hub_configs_are_read_with_the_defaults_of_their_classes() -> None:
    text = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "vocab_size": 32064}
    vision = CLIP | {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24}
    config = LLAVA | {"text_config": text, "vision_config": vision, "image_token_index": 32000}
    spec = vlm_from_disk(config, where="config.json")
    assert spec.num_parameters == PUBLISHED["llava-1.5-7b"]
    flat = {
        "model_type": "qwen2_vl", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "use_sliding_window": False,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "image_token_id": 151655,
        "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3,
                          "hidden_size": 1536, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    }  # fmt: skip
    spec = vlm_from_disk(flat, where="config.json")
    language = replace(spec.language, name="qwen2.5-1.5b")
    assert replace(spec, name="qwen2-vl-2b", language=language) == VLM_PRESETS["qwen2-vl-2b"]


@pytest.mark.parametrize("config", [Qwen2VLConfig(), Qwen2_5_VLConfig()], ids=["qwen2-vl", "qwen2.5-vl"])
def test_the_defaults_of_transformers_are_read(config: Any) -> None:
    fields = config.to_dict()
    name = "hidden_size" if fields["model_type"] == "qwen2_vl" else "out_hidden_size"
    fields["vision_config"] |= {name: 8192}
    spec = vlm_from_disk(fields, where="config.json")
    assert (spec.language.layers, spec.hidden, spec.vision.layers) == (80, 8192, 32)
    fields["vision_config"][name] = 8000
    with pytest.raises(UserError, match="8000 is not the language's 8192"):
        vlm_from_disk(fields, where="config.json")
