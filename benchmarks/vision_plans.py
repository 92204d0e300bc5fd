"""Plans of vision-language and perception models for `rehearsals.py`, and the images that they are trained on.

Images of a VLM are drawn here, with sides that differ from one to the next, and the prediction is made from their
sizes as for any data. Scenes of a perception model are simulated by the trainer's own data source.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

ONE_GPU = {"precision": "bf16", "loss": "fused", "compile": False, "recompute": "none", "offload": "none"}
PLAIN_LOSS = {"loss": "logits"}
SHARDED = PLAIN_LOSS | {"mesh": {"dp_shard": 8}, "sharding": "parameters"}
# Vision towers of 0.7, 0.7 and 0.3B; language of 1.5, 3 and, with 8 layers, 1.7B.
NATIVE, WINDOWED, TILED = "qwen2-vl-2b", "qwen2.5-vl-3b", "llava-1.5-7b"
WIDE = {"hidden": 512, "ffn": 2048, "fusion_layers": 12}
NARROW = {"camera_widths": [32, 64, 128], "hidden": 128, "ffn": 512, "heads": 4, "cells": 64, "height": 128}
NUM_IMAGES = 192
TINY_IMAGE = 60  # pixels a side at most, on a CPU
WORKERS = 4


class VisionPlan(NamedTuple):
    """A plan of one rank. `sides`: the least and the largest side of an image in pixels; None: a perception model."""

    name: str
    preset: str
    plan: dict[str, Any]
    sides: tuple[int, int] | None = None
    shape: dict[str, Any] | None = None
    seq_len: int = 4096
    freeze: tuple[str, ...] = ()


VISION_PLANS = (
    VisionPlan("vlm-native", NATIVE, {"micro_batch": 2}, (280, 840)),
    VisionPlan("vlm-native-compiled", NATIVE, {"micro_batch": 2, "compile": True}, (280, 840)),
    VisionPlan("vlm-native-full", NATIVE, {"micro_batch": 4, "recompute": "full"}, (280, 840)),
    VisionPlan("vlm-native-fsdp8", NATIVE, SHARDED | {"micro_batch": 2}, (280, 840)),
    VisionPlan("vlm-small-images", NATIVE, {"micro_batch": 4}, (112, 224), None, 2048),
    VisionPlan("vlm-windowed-frozen", WINDOWED, {"micro_batch": 2}, (560, 1120), None, 4096, ("vision",)),
    VisionPlan("vlm-tiled", TILED, {"micro_batch": 8}, (300, 900), {"language": {"layers": 8}}, 2048),
    VisionPlan("perception-base", "base", PLAIN_LOSS | {"micro_batch": 4}),
    VisionPlan("perception-base-full", "base", PLAIN_LOSS | {"micro_batch": 8, "recompute": "full"}),
    VisionPlan("perception-wide", "base", PLAIN_LOSS | {"micro_batch": 2}, None, WIDE),
    VisionPlan("perception-narrow", "base", PLAIN_LOSS | {"micro_batch": 8}, None, NARROW),
    VisionPlan("perception-fsdp8", "base", SHARDED | {"micro_batch": 4}),
)
BY_NAME = {each.name: each for each in VISION_PLANS}
TINY_SCENES = {"camera_widths": [16, 48], "height": 32, "width": 64, "cells": 16, "hidden": 48, "heads": 4}


def vision_settings(name: str, *, tiny: bool, images: Path | None) -> dict[str, Any]:
    """Return the recipe's fields of a plan. Images are drawn into the folder `images`, unless they are there.

    Without a folder they name other data, of the size of one image: their rows are to be given otherwise.
    """
    case = BY_NAME[name]
    plan, shape = ONE_GPU | case.plan, case.shape or {}
    if tiny:
        plan |= {"precision": "fp32", "compile": False}
    fields: dict[str, Any] = {
        "train.global_batch": plan["micro_batch"] * plan.get("mesh", {}).get("dp_shard", 1),
        "cluster": "8xH200" if "mesh" in plan else "1xH200",
        "plan": plan,
        "data.workers": 0 if tiny else WORKERS,
    }
    if case.sides is None:
        shape = TINY_SCENES | ({"fusion_layers": 2} if shape else {}) if tiny else shape
        return fields | {
            "model.family": "perception", "model.preset": case.preset, "model.shape": shape, "data.source": "scenes"
        }  # fmt: skip
    sides = (TINY_IMAGE // 2, TINY_IMAGE) if tiny else case.sides
    small = "tiny-tiled" if case.preset == TILED else "tiny"
    preset = small if tiny else case.preset
    fields |= {
        "model.family": "vlm", "model.preset": preset, "data.seq_len": 512 if tiny else case.seq_len,
    }  # fmt: skip
    if images is None:
        fields |= {"data.source": "shapes", "data.images_per_sample": 1, "data.image_size": sides[0]}
    else:
        folder = images / f"{sides[0]}-{sides[1]}"
        fields |= {"data.source": "chat", "data.path": str(drawn_images(folder, sides))}
    fields |= {"model.shape": shape} if shape and not tiny else {}
    return fields | ({"model.freeze": list(case.freeze)} if case.freeze else {})


def drawn_images(folder: Path, sides: tuple[int, int]) -> Path:
    """Return the list of questions about images of random sizes, which are written unless they exist."""
    lines = folder / "questions.jsonl"
    if lines.exists():
        return lines
    folder.mkdir(parents=True, exist_ok=True)
    draw, rows = np.random.default_rng(0), []
    for number in range(NUM_IMAGES):
        height, width = (int(each) for each in draw.integers(sides[0], sides[1] + 1, 2))
        colours = draw.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(colours).resize((width, height)).save(folder / f"{number}.jpg")
        words = " ".join(f"colour {each}" for each in draw.integers(0, 256, int(draw.integers(4, 40))))
        turns = [
            {"role": "user", "content": "<image> Which colours are these?"},
            {"role": "assistant", "content": words},
        ]
        rows.append({"image": f"{number}.jpg", "messages": turns})
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lines
