"""The projector between the towers, and the module that inserts its image tokens into the text."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.models.vlm_spec import VlmSpec
from trimaran.nets.vlm.vision import VisionLayerNorm, norm_of


class DeepProjector(nn.Module):
    """Maps the features of an early vision layer to what is added to the image tokens after a decoder layer."""

    def __init__(self, spec: VlmSpec) -> None:
        super().__init__()
        self.norm = VisionLayerNorm(spec.feature_width, eps=spec.vision.block.norm_eps)
        self.linear_1 = nn.Linear(spec.feature_width, spec.projector_middle)
        self.linear_2 = nn.Linear(spec.projector_middle, spec.hidden)

    def forward(self, features: Tensor) -> Tensor:
        """Return [M, hidden] of `features` [M, width]."""
        return self.linear_2(F.gelu(self.linear_1(self.norm(features))))


class Projector(nn.Module):
    """Maps patch features to image tokens of the language model."""

    def __init__(self, spec: VlmSpec) -> None:
        super().__init__()
        self.patch_width, self.norm = spec.vision.hidden, None
        if spec.projector.kind == "pixel-shuffle":
            self.norm, self.patch_width = VisionLayerNorm(spec.feature_width), spec.feature_width
        elif spec.projector.normed:
            self.norm = norm_of(spec.vision, self.patch_width)
        self.linear_1 = nn.Linear(spec.feature_width, spec.projector_middle)
        self.linear_2 = nn.Linear(spec.projector_middle, spec.hidden)
        taps = spec.projector.deepstack
        self.deep = nn.ModuleList(DeepProjector(spec) for _ in taps) if taps else None

    def forward(self, features: Tensor) -> Tensor:
        """Return the tokens [M, hidden] of `features` [M, width]: the merged patches of each token, concatenated.

        With deepstack, the features of its layers follow in the last dimension, and so do their tokens.
        """
        if self.deep is not None:
            own, *others = features.chunk(1 + len(self.deep), -1)
            deep = [module(each) for module, each in zip(self.deep, others, strict=True)]
            return torch.cat([self._tokens(own), *deep], -1)
        return self._tokens(features)

    def _tokens(self, features: Tensor) -> Tensor:
        if self.norm is not None:
            features = self.norm(features.unflatten(1, (-1, self.patch_width))).flatten(1)
        return self.linear_2(F.gelu(self.linear_1(features)))


class InsertImageTokens(nn.Module):
    """Inserts image tokens into the text stream. It has no parameters; it is a module so that a TP plan can name it."""

    def forward(self, stream: Tensor, rows: Tensor, index: Tensor) -> Tensor:
        """Return `stream` [B, T, hidden] with row `index` [B, T] of `rows` [M, hidden] wherever it is not negative.

        M is at least 1. A row that no position uses gets a zero gradient, so that the vision tower and the projector
        take part in the collectives of backward.
        """
        chosen = rows[index.clamp(min=0)].to(stream.dtype)
        return torch.where((index >= 0).unsqueeze(-1), chosen, stream)


def image_token_index(tokens: Tensor, image_token: int) -> Tensor:
    """Return the number of the image token at each position of `tokens` [B, T], counted row by row; -1 for text."""
    is_image = tokens == image_token
    counted = is_image.flatten().cumsum(0).view_as(tokens) - 1
    return counted.masked_fill(~is_image, -1)
