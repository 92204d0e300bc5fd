"""InternVL's folders: read and written in OpenGVLab's own layout, with the tiles of its own preprocessing."""

import io
import json
import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import InternVLForConditionalGeneration
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

from tests.vlm_models import CONFIGS, INTERN_VIT, SQUARES, TEXT, hf_inputs, inputs_of, perturb, random_images
from trimaran.checkpoint import write_hf_folder
from trimaran.core import ImageRules, ModelSection, UserError
from trimaran.data import fill_patches, grids_of
from trimaran.models import VLM_PRESETS, VlmSpec, spec_of, vlm_from_disk, vlm_to_disk
from trimaran.nets import network_of, open_base_weights

TOKENS = {"<IMG_CONTEXT>": 300, "<img>": 301, "</img>": 302}
VISION_NAMES = {
    r"^model\.vision_tower\.encoder\.layer\.": "vision_model.encoder.layers.",
    r"^model\.vision_tower\.embeddings\.": "vision_model.embeddings.",
    r"\.cls_token$": ".class_embedding",
    r"\.position_embeddings$": ".position_embedding",
    r"\.patch_embeddings\.projection\.": ".patch_embedding.",
    r"\.layernorm_before\.": ".norm1.",
    r"\.layernorm_after\.": ".norm2.",
    r"\.attention\.projection_layer\.": ".attn.proj.",
    r"\.attention\.": ".attn.",
    r"\.lambda_1$": ".ls1",
    r"\.lambda_2$": ".ls2",
    r"^model\.multi_modal_projector\.layer_norm\.": "mlp1.0.",
    r"^model\.multi_modal_projector\.linear_1\.": "mlp1.1.",
    r"^model\.multi_modal_projector\.linear_2\.": "mlp1.3.",
    r"^model\.language_model\.": "language_model.model.",
    r"^lm_head\.": "language_model.lm_head.",
}
INTERNLM_NAMES = {
    r"^language_model\.lm_head\.": "language_model.output.",
    r"\.embed_tokens\.": ".tok_embeddings.",
    r"(language_model.*)\.input_layernorm\.": r"\1.attention_norm.",
    r"(language_model.*)\.post_attention_layernorm\.": r"\1.ffn_norm.",
    r"\.self_attn\.o_proj\.": ".attention.wo.",
    r"\.mlp\.gate_proj\.": ".feed_forward.w1.",
    r"\.mlp\.up_proj\.": ".feed_forward.w3.",
    r"\.mlp\.down_proj\.": ".feed_forward.w2.",
}


def renamed(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    out = {}
    for name, value in tensors.items():
        for pattern, better in names.items():
            name = re.sub(pattern, better, name)
        out[name] = value
    return out


def packed(tensors: dict[str, Tensor], part: str, whole: str, kv_heads: int) -> dict[str, Tensor]:
    """Return the tensors with queries, keys and values joined as published; 0 key-value heads: one after the other."""
    out = {name: value for name, value in tensors.items() if not re.search(part.format("[qkv]"), name)}
    for name in tensors:
        if re.search(part.format("q"), name):
            values = [tensors[name.replace("q_proj", f"{each}_proj")] for each in "qkv"]
            if kv_heads:
                values = [each.unflatten(0, (kv_heads, -1)) for each in values]
            joined = torch.cat(values, 1).flatten(0, 1) if kv_heads else torch.cat(values)
            out[re.sub(part.format("q"), whole, name)] = joined
    return out


def chat_folder(folder: Path, name: str) -> tuple[InternVLForConditionalGeneration, dict[str, Tensor]]:
    """Write a random model of transformers as OpenGVLab would, and return it with the tensors on disk."""
    torch.manual_seed(0)
    config = CONFIGS["internvl" if name == "qwen2" else "internvl-6b"]
    model = InternVLForConditionalGeneration(config).eval()
    perturb(model)
    if name == "internlm2":
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    tensors = renamed({key: value.clone() for key, value in model.state_dict().items()}, VISION_NAMES)
    tensors = packed(tensors, r"(vision_model.*)\.attn\.{}_proj", r"\1.attn.qkv", 0)
    if name == "internlm2":
        tensors = packed(tensors, r"(language_model.*)\.self_attn\.{}_proj", r"\1.attention.wqkv", 2)
        tensors = renamed(tensors, INTERNLM_NAMES)
    save_file(tensors, folder / "model.safetensors")
    text = TEXT | {"model_type": name, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    extra = {"bias": False, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "attn_implementation": "eager"}
    is_6b = name == "internlm2"
    tree = {
        "model_type": "internvl_chat", "architectures": ["InternVLChatModel"], "template": "internvl2_5",
        "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"}, "ps_version": "v2",
        "downsample_ratio": 0.5, "force_image_size": 16, "max_dynamic_patch": 6, "use_thumbnail": True,
        "select_layer": -1, "llm_config": text | (extra if is_6b else {}),
        "vision_config": INTERN_VIT | {
            "model_type": "intern_vit_6b", "image_size": 16, "patch_size": 4, "qkv_bias": not is_6b,
            "qk_normalization": is_6b, "norm_type": "rms_norm" if is_6b else "layer_norm", "drop_path_rate": 0.1,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(tree))
    (folder / "configuration_internvl_chat.py").write_text("# the code of the model\n")
    return model, tensors


def add_tokenizer(folder: Path, file: str) -> None:
    tree: dict[str, Any] = TOKENS
    if file == "tokenizer_config.json":
        tree = {"added_tokens_decoder": {str(number): {"content": token} for token, number in TOKENS.items()}}
    elif file == "tokenizer.json":
        tree = {"added_tokens": [{"id": number, "content": token} for token, number in TOKENS.items()]}
    (folder / file).write_text(json.dumps(tree))


def spec_in(folder: Path) -> VlmSpec:
    spec = spec_of(ModelSection(family="vlm", path=str(folder)))
    assert isinstance(spec, VlmSpec)
    return spec


@pytest.mark.parametrize("name", ["internlm2", "qwen2"])
def test_a_folder_of_opengvlab_gives_the_logits_of_transformers_and_is_written_back_bit_for_bit(
    name: str, tmp_path: Path
) -> None:
    model, tensors = chat_folder(tmp_path, name)
    add_tokenizer(tmp_path, "added_tokens.json")
    spec = spec_in(tmp_path)
    assert (spec.image_token, spec.before, spec.after, spec.max_tiles) == (300, (301,), (302,), 6)
    ours = network_of(spec)
    ours.load(tmp_path)
    images = random_images(SQUARES)
    inputs = inputs_of(spec, images, [[None, 0, None, 1, None], [None, None, 2, None]])
    with torch.no_grad():
        wanted = model(**hf_inputs(spec, inputs, images)).logits
        logits, _ = ours.forward(inputs)
    assert (logits - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    written = dict(ours.disk_tensors())
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[key], tensors[key]) for key in tensors)
    again = vlm_from_disk(ours.disk_config(), where="config.json")
    assert again == replace(spec, name=again.name, language=replace(spec.language, name=again.language.name))


def test_packed_weights_can_be_read_one_by_one(tmp_path: Path) -> None:
    chat_folder(tmp_path, "internlm2")
    add_tokenizer(tmp_path, "tokenizer.json")
    ours = network_of(spec_in(tmp_path))
    ours.load(tmp_path)
    with ExitStack() as stack:
        base = open_base_weights(ModelSection(family="vlm", path=str(tmp_path)), 0, stack)
        for name, parameter in ours.module.named_parameters():
            assert torch.equal(base.read(name), parameter), name


def test_the_written_folder_keeps_the_code_and_the_other_fields_of_the_original(tmp_path: Path) -> None:
    origin, out = tmp_path / "origin", tmp_path / "out"
    origin.mkdir()
    _, tensors = chat_folder(origin, "internlm2")
    add_tokenizer(origin, "tokenizer_config.json")
    spec = spec_in(origin)
    write_hf_folder(out, vlm_to_disk(spec), tensors.items(), origin=origin, add_files=lambda _: None)
    config = json.loads((out / "config.json").read_text())
    assert config["template"] == "internvl2_5"
    assert config["auto_map"] == {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"}
    assert config["llm_config"]["rope_scaling"] == {"type": "dynamic", "factor": 2.0}
    assert config["vision_config"]["drop_path_rate"] == 0.1
    assert (out / "configuration_internvl_chat.py").is_file()
    assert load_file(out / "model.safetensors").keys() == tensors.keys()
    assert spec_in(out) == replace(spec, name="out")


def test_a_folder_without_the_ids_of_its_image_tokens_is_refused(tmp_path: Path) -> None:
    chat_folder(tmp_path, "qwen2")
    with pytest.raises(UserError, match="which token stands for an image") as caught:
        spec_in(tmp_path)
    assert caught.value.code == "M074"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ps_version": "v1"}, "ps_version is 'v1'"),
        ({"use_llm_lora": 16}, "its weights hold a LoRA adapter: use_llm_lora"),
        ({"downsample_ratio": 0.25}, "downsample_ratio is 0.25"),
        ({"select_layer": 9}, "its features are those of layer 9 of 3"),
    ],
)
def test_what_our_network_lacks_is_named(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    chat_folder(tmp_path, "qwen2")
    config = json.loads((tmp_path / "config.json").read_text()) | {"image_token_id": 300} | change
    with pytest.raises(UserError, match=re.escape(reason)) as caught:
        vlm_from_disk(config, where="config.json")
    assert caught.value.code == "M034"


def test_a_tied_head_that_differs_from_the_embedding_is_refused(tmp_path: Path) -> None:
    chat_folder(tmp_path, "internlm2")
    add_tokenizer(tmp_path, "added_tokens.json")
    config = json.loads((tmp_path / "config.json").read_text())
    config["llm_config"]["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"config\.json ties the head to the embedding") as caught:
        network_of(spec_in(tmp_path)).load(tmp_path)
    assert caught.value.code == "M075"


def test_tiles_are_those_of_internvl_and_the_thumbnail_comes_last() -> None:
    rules = VLM_PRESETS["internvl-26b"].images()
    random = np.random.default_rng(0)
    for width, height in random.integers(30, 3000, (200, 2)).tolist():
        columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), 1, 12)
        tiles = rows * columns
        assert len(grids_of((width, height), rules)) == tiles + (tiles > 1), (width, height)


@pytest.mark.parametrize("thumbnail", ["first", "last", "none"])
def test_the_thumbnail_has_its_place(thumbnail: Any) -> None:
    rules = ImageRules(patch=2, merge=2, image_token=0, variant="tiled", tile=8, max_tiles=4, thumbnail=thumbnail)
    pixels = np.zeros((8, 16, 3), dtype=np.uint8)
    pixels[:, :8], pixels[:, 8:] = 10, 200
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    grids = grids_of((16, 8), rules)
    out = np.zeros((int(grids.prod(1).sum()), 12), dtype=np.uint8)
    fill_patches(file.getvalue(), (16, 8), rules, out)
    means = [round(float(each.mean())) for each in out.reshape(len(grids), -1)]
    assert means == {"first": [105, 10, 200], "last": [10, 200, 105], "none": [10, 200]}[thumbnail]
