"""Small vision-language models, ours and those of transformers, with images and micro-batches for both."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    InternVLConfig,
    LlavaConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from tests.random_weights import perturb as perturb
from trimaran.models import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    VLM_PRESETS,
    ProjectorSpec,
    VisionBlock,
    VisionEnds,
    VlmSpec,
    vlm_to_disk,
)
from trimaran.nets import Vlm, initialise

IMAGE = 300
TEXT = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
GRID = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}, "rope_theta": 1e4}
TOKENS = {"image_token_id": IMAGE, "vision_start_token_id": 301, "vision_end_token_id": 302, "video_token_id": 303}
VISION = {"depth": 3, "num_heads": 2, "patch_size": 4}
CLIP = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
CONFIGS: dict[str, Any] = {
    "qwen2-vl": Qwen2VLConfig(
        text_config=TEXT | GRID, vision_config=VISION | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}, **TOKENS
    ),
    "qwen2-vl-tied": Qwen2VLConfig(
        text_config=TEXT | GRID,
        vision_config=VISION | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 4, "spatial_merge_size": 1},
        tie_word_embeddings=True,
        **TOKENS,
    ),
    "qwen2.5-vl": Qwen2_5_VLConfig(
        text_config=TEXT | GRID,
        vision_config=VISION
        | {
            "hidden_size": 16,
            "out_hidden_size": 32,
            "intermediate_size": 24,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        **TOKENS,
    ),
    "llava": LlavaConfig(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=CLIP | {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 4},
        image_token_index=IMAGE,
    ),
}
INTERN_VIT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
INTERN_VIT |= {"model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]}
INTERN_TOKENS: dict[str, Any] = {"image_token_id": IMAGE, "image_start_token_id": 301, "image_end_token_id": 302}
QWEN_3_TEXT = TEXT | {"num_hidden_layers": 3, "head_dim": 12}
QWEN_3_TEXT |= {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e4}}
QWEN_3_VISION = VISION | {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24}
QWEN_3_VISION |= {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CONFIGS |= {
    "qwen3-vl": Qwen3VLConfig(text_config=QWEN_3_TEXT, vision_config=QWEN_3_VISION, **TOKENS),
    "qwen3-vl-moe": Qwen3VLMoeConfig(
        text_config=QWEN_3_TEXT | EXPERTS, vision_config=QWEN_3_VISION, tie_word_embeddings=False, **TOKENS
    ),
    "internvl": InternVLConfig(
        text_config=TEXT | {"model_type": "qwen2"},
        vision_config=INTERN_VIT | {"attention_bias": True},
        tie_word_embeddings=False,
        **INTERN_TOKENS,
    ),
    "internvl-6b": InternVLConfig(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=INTERN_VIT | {"use_qk_norm": True, "norm_type": "rms_norm"},
        tie_word_embeddings=True,
        **INTERN_TOKENS,
    ),
}
HF_CONFIGS = [name for name in CONFIGS if not name.startswith("qwen3-vl")]  # those that family hf trains with images
SQUARES = ((4, 4), (4, 4), (4, 4))
SHAPES = dict.fromkeys(("llava", "internvl", "internvl-6b"), SQUARES)  # rows and columns of patches; one for each image
VARIOUS = ((4, 6), (10, 2), (6, 6))
_LANGUAGE = replace(VLM_PRESETS["tiny"].language, layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8)
NATIVE = replace(
    VLM_PRESETS["tiny"],
    vision=replace(VLM_PRESETS["tiny"].vision, layers=3, hidden=16, heads=2, ffn=32, patch=4),
    projector=ProjectorSpec(merge=2, hidden=64),
    language=_LANGUAGE,
    sections=(2, 1, 1),
)
TILED = replace(
    VLM_PRESETS["tiny-tiled"],
    vision=replace(
        VLM_PRESETS["tiny-tiled"].vision,
        layers=3,
        hidden=16,
        heads=2,
        ffn=32,
        patch=4,
        tile=16,
        block=VisionBlock(qk_norm=True, scaled=True, qkv_bias=False),
    ),
    language=replace(_LANGUAGE, block=VLM_PRESETS["tiny-tiled"].language.block),
)
WINDOWED = replace(NATIVE, vision=replace(NATIVE.vision, window=16, full_layers=(2,)))
DEEP = replace(
    NATIVE,
    vision=replace(NATIVE.vision, ends=VisionEnds(stem_bias=True, table=5, mean=(0.5,) * 3, std=(0.5,) * 3)),
    projector=replace(NATIVE.projector, deepstack=(0, 1)),
    language=replace(_LANGUAGE, block=replace(_LANGUAGE.block, qkv_bias=False, qk_norm=True)),
    sections=(1, 1, 1, 1),
)
INTERNLM = replace(
    TILED,
    vision=replace(
        TILED.vision,
        block=VisionBlock(rms_norm=True, qk_norm=True, scaled=True, qkv_bias=False),
        ends=VisionEnds(class_token=True, stem_bias=True, thumbnail="last", mean=IMAGENET_MEAN, std=IMAGENET_STD),
    ),
    language=replace(TILED.language, tied=False),
    layout="internvl_internlm2",
)
SPECS = {
    "native": NATIVE,
    "tiled": TILED,
    "windowed": WINDOWED,
    "deepstack": DEEP,
    "internlm2": INTERNLM,
    "untied": replace(NATIVE, language=replace(_LANGUAGE, tied=False)),
}
STAGE_SPLITS = ((3, 1, 2), (1, 1, 1, 1, 1, 1))


def random_images(shapes: Sequence[tuple[int, int]], patch: int = 4) -> list[Tensor]:
    """Return random images [3, height, width] with these numbers of rows and columns of patches."""
    random = torch.Generator().manual_seed(2)
    return [
        torch.randint(0, 256, (3, rows * patch, columns * patch), generator=random, dtype=torch.uint8)
        for rows, columns in shapes
    ]


def patches_of(image: Tensor, patch: int, merge: int) -> Tensor:
    """Return the patches of an image, merged group by merged group, each in row order."""
    _, height, width = image.shape
    side = patch * merge
    split = image.reshape(3, height // side, merge, patch, width // side, merge, patch)
    return split.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3 * patch * patch)


def inputs_of(spec: VlmSpec, images: Sequence[Tensor], rows: Sequence[Sequence[int | None]]) -> dict[str, Tensor]:
    """Return a micro-batch: each row lists images by number, and None for a few text tokens between them."""
    merge, patch = spec.projector.merge, spec.vision.patch
    random = torch.Generator().manual_seed(3)
    lines = []
    for row in rows:
        line: list[Tensor] = []
        for each in row:
            text = torch.randint(0, 256, (3,), generator=random)
            count = 0 if each is None else images[each].shape[1] * images[each].shape[2] // (patch * merge) ** 2
            line += [text] if each is None else [torch.full((count,), spec.image_token)]
        lines.append(torch.cat(line))
    longest = max(map(len, lines))
    tokens = torch.stack([torch.cat([each, torch.full((longest - len(each),), 7)]) for each in lines])
    used = [images[each] for row in rows for each in row if each is not None]
    empty = torch.zeros(0, 3 * patch * patch, dtype=torch.uint8)
    grids = [[each.shape[1] // patch, each.shape[2] // patch] for each in used]
    return {
        "tokens": tokens,
        "patches": torch.cat([empty, *(patches_of(each, patch, merge) for each in used)]),
        "grids": torch.tensor(grids, dtype=torch.int32).view(-1, 2),
    }


def normalised(pixels: Tensor, ends: VisionEnds) -> Tensor:
    """Return pixels [..., 3, n] normalised as the model's image processor does it."""
    mean, std = (torch.tensor(each)[:, None] for each in (ends.mean, ends.std))
    return (pixels / 255 - mean) / std


def hf_inputs(spec: VlmSpec, inputs: dict[str, Tensor], images: Sequence[Tensor]) -> dict[str, Tensor]:
    tokens, patches = inputs["tokens"], inputs["patches"]
    if spec.vision.variant == "tiled":
        return {
            "input_ids": tokens,
            "pixel_values": normalised(torch.stack(list(images)).flatten(2), spec.vision.ends).view(
                -1, *images[0].shape
            ),
        }
    pixels = normalised(patches.view(len(patches), 3, -1), spec.vision.ends)
    video = pixels[:, :, None].expand(-1, -1, spec.vision.frames, -1).flatten(1)
    grids = torch.cat([torch.ones(len(inputs["grids"]), 1, dtype=torch.int64), inputs["grids"].long()], 1)
    kinds = (tokens == spec.image_token).int()
    return {"input_ids": tokens, "pixel_values": video, "image_grid_thw": grids, "mm_token_type_ids": kinds}


def hf_positions(model: PreTrainedModel, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    if "image_grid_thw" not in theirs:
        return {}
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw")
    positions, _ = model.model.get_rope_index(**{name: theirs[name] for name in names})
    return {"positions": positions}


def initialised(spec: VlmSpec, blocks: range | None = None) -> Vlm:
    module = Vlm(spec, blocks)
    initialise(module, seed=5, spec=spec)
    return module


def write(folder: Path, spec: VlmSpec, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(vlm_to_disk(spec)))


def some_inputs(spec: VlmSpec) -> dict[str, Tensor]:
    images = random_images(((4, 4), (4, 4), (4, 4)) if spec.vision.variant == "tiled" else VARIOUS)
    inputs = inputs_of(spec, images, [[None, 0, None, 1, None], [None, None, 2, None]])
    inputs["documents"] = torch.zeros_like(inputs["tokens"], dtype=torch.int32)
    inputs["documents"][0, 15:] = 1
    if spec.sections:
        length = inputs["tokens"].shape[1]
        inputs["positions"] = torch.randint(0, length, (3, 2, length), generator=torch.Generator().manual_seed(4))
    return inputs
