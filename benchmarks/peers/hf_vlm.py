"""transformers' Qwen2-VL, unchanged, and rows for it: an image, then random tokens.

The rows bring their positions along. Otherwise the model finds them out in every step, in Python, and waits for it.
"""

from typing import Any

import torch
from benchmarks.peers.work import SEED, Eye, Work, draw_row
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

IGNORED = -100


class ImageRows(Dataset):
    """Every row has the same image, drawn once: the processor's work is not what is compared."""

    def __init__(self, work: Work) -> None:
        self.work, self.config = work, work.model.config(work.seq_len)
        self.eye = eye_of(work)
        draw = torch.Generator().manual_seed(SEED)
        # Both frames of a patch are the same image.
        frame = torch.randn(self.eye.patches**2, 3, 1, self.eye.patch**2, generator=draw)
        self.pixels = frame.expand(-1, -1, 2, -1).flatten(1)
        self.grid = torch.tensor([[1, self.eye.patches, self.eye.patches]])
        self.positions = positions(self.eye, work.seq_len)

    def __len__(self) -> int:
        return self.work.all_steps * self.work.micro_batch

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.from_numpy(draw_row(self.work, index)[:-1]) % (self.work.model.vocab - 4)
        seen = slice(1, 1 + self.eye.tokens)
        tokens[0] = self.config["vision_start_token_id"]
        tokens[seen] = self.config["image_token_id"]
        tokens[seen.stop] = self.config["vision_end_token_id"]
        labels = tokens.clone()
        labels[: seen.stop + 1] = IGNORED
        told = {"input_ids": tokens, "labels": labels, "position_ids": self.positions}
        return told | {"pixel_values": self.pixels, "image_grid_thw": self.grid}


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch: the patches and grids of all images lie one behind the other."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}
    batch |= {name: torch.cat([row[name] for row in rows]) for name in ("pixel_values", "image_grid_thw")}
    return batch | {"position_ids": torch.stack([row["position_ids"] for row in rows], dim=1)}


def positions(eye: Eye, seq_len: int) -> Tensor:
    """Return time, row and column [3, seq_len] of each token: one in front of the image, the image, the rest."""
    side = eye.patches // eye.merge
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    image = 1 + torch.stack([torch.zeros_like(row), row, column]).flatten(1)
    rest = 1 + side + torch.arange(seq_len - 1 - eye.tokens)
    return torch.cat([torch.zeros(3, 1, dtype=torch.int64), image, rest.expand(3, -1)], dim=1)


def build_vlm(work: Work) -> Qwen2VLForConditionalGeneration:
    """Return the model with random fp32 weights, on the device that there is."""
    torch.manual_seed(SEED)
    settings: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2VLForConditionalGeneration._from_config(
            Qwen2VLConfig(**work.model.config(work.seq_len)), **settings
        )
    model.config.use_cache = False
    return model


def eye_of(work: Work) -> Eye:
    assert work.model.eye is not None, f"{work.shape} does not see"
    return work.model.eye
