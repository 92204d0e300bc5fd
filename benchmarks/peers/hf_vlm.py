"""transformers' Qwen2-VL, unchanged, and its rows: an image, then random tokens.

The rows include their positions. Otherwise the model computes them in Python in every step, and synchronises.
"""

from typing import Any

import torch
from benchmarks.peers.work import SEED, VisionShape, Work, draw_row
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

IGNORED = -100


class ImageRows(Dataset):
    """Every row has the same image, drawn once: image processing is not compared."""

    def __init__(self, work: Work) -> None:
        self.work, self.config = work, work.model.config(work.seq_len)
        self.vision = vision_of(work)
        draw = torch.Generator().manual_seed(SEED)
        # Both frames of a patch are the same image.
        frame = torch.randn(self.vision.patches**2, 3, 1, self.vision.patch**2, generator=draw)
        self.pixels = frame.expand(-1, -1, 2, -1).flatten(1)
        self.grid = torch.tensor([[1, self.vision.patches, self.vision.patches]])
        self.positions = positions(self.vision, work.seq_len)

    def __len__(self) -> int:
        return self.work.all_steps * self.work.rows_per_step

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.from_numpy(draw_row(self.work, index)[:-1]) % (self.work.model.vocab - 4)
        seen = slice(1, 1 + self.vision.tokens)
        tokens[0] = self.config["vision_start_token_id"]
        tokens[seen] = self.config["image_token_id"]
        tokens[seen.stop] = self.config["vision_end_token_id"]
        labels = tokens.clone()
        labels[: seen.stop + 1] = IGNORED
        row = {"input_ids": tokens, "labels": labels, "position_ids": self.positions}
        return row | {"pixel_values": self.pixels, "image_grid_thw": self.grid}


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch, with the patches and grids of all images concatenated."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}
    batch |= {name: torch.cat([row[name] for row in rows]) for name in ("pixel_values", "image_grid_thw")}
    return batch | {"position_ids": torch.stack([row["position_ids"] for row in rows], dim=1)}


def positions(vision: VisionShape, seq_len: int) -> Tensor:
    """Return time, row and column [3, seq_len] of each token: one before the image, the image, the rest."""
    side = vision.patches // vision.merge
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    image = 1 + torch.stack([torch.zeros_like(row), row, column]).flatten(1)
    rest = 1 + side + torch.arange(seq_len - 1 - vision.tokens)
    return torch.cat([torch.zeros(3, 1, dtype=torch.int64), image, rest.expand(3, -1)], dim=1)


def build_vlm(work: Work) -> Qwen2VLForConditionalGeneration:
    """Return the model with random fp32 weights, on the GPU if there is one."""
    torch.manual_seed(SEED)
    settings: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2VLForConditionalGeneration._from_config(
            Qwen2VLConfig(**work.model.config(work.seq_len)), **settings
        )
    model.config.use_cache = False
    return model


def vision_of(work: Work) -> VisionShape:
    assert work.model.vision is not None, f"{work.shape} has no vision tower"
    return work.model.vision
