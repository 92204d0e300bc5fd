"""Between the towers: patches that become a token, side by side, and two products; and where those tokens go."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.models.vlm_spec import VlmSpec
from trimaran.nets.vision import VisionLayerNorm, norm_of


class Projector(nn.Module):
    """Features of patches in, the language's image tokens out."""

    def __init__(self, spec: VlmSpec) -> None:
        super().__init__()
        self.patch_width, self.norm = spec.vision.hidden, None
        if spec.projector.kind == "pixel-shuffle":
            self.norm, self.patch_width = VisionLayerNorm(spec.feature_width), spec.feature_width
        elif spec.projector.normed:
            self.norm = norm_of(spec.vision, self.patch_width)
        self.linear_1 = nn.Linear(spec.feature_width, spec.projector_middle)
        self.linear_2 = nn.Linear(spec.projector_middle, spec.hidden)

    def forward(self, features: Tensor) -> Tensor:
        """Return the tokens [M, hidden] of `features` [M, width]: the merged patches of each, side by side."""
        if self.norm is not None:
            features = self.norm(features.unflatten(1, (-1, self.patch_width))).flatten(1)
        return self.linear_2(F.gelu(self.linear_1(features)))


class TokenSlots(nn.Module):
    """Puts image tokens into a stream of text. It has no parameters; it is a module so that a plan can change it."""

    def forward(self, stream: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        """Return `stream` [B, T, hidden] with row `slots` [B, T] of `rows` [M, hidden] wherever that is not negative.

        There is at least one row, if nobody wants it: then it gets a gradient of zero, so that the towers before take
        part in whatever the ranks do together.
        """
        chosen = rows[slots.clamp(min=0)].to(stream.dtype)
        return torch.where((slots >= 0).unsqueeze(-1), chosen, stream)


def slots_of(tokens: Tensor, image_token: int) -> Tensor:
    """Return which image token stands at each position of `tokens` [B, T], counted row by row; -1: it is text."""
    pictured = tokens == image_token
    counted = pictured.flatten().cumsum(0).view_as(tokens) - 1
    return counted.masked_fill(~pictured, -1)
