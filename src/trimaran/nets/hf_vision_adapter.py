"""How our images come to the vision tower of a Hugging Face model, and its rows into the stream of text."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.models.vlm_spec import CHANNELS, VlmSpec
from trimaran.nets.hf_attention import pack_images
from trimaran.nets.image_balancing import Pictures
from trimaran.nets.patch_layout import lay_out, rows_and_columns
from trimaran.nets.projector import slots_of
from trimaran.nets.vision import normed


class VisionAdapter(ABC):
    """Looks at the images of a micro-batch while its text is embedded, and puts what it sees into the stream.

    That is inside the model's own forward, where DDP and FSDP expect every use of its parameters. The model's own way
    would count image tokens on the device, wait for the number, and wait again in backward.
    """

    def __init__(self, module: Any, spec: VlmSpec) -> None:
        self._model, self.spec = module.model, spec
        self._shown: Pictures | None = None
        self._is_black = False
        module.get_input_embeddings().register_forward_hook(self._place)
        for part in self.unused:
            part.requires_grad_(False)

    @property
    @abstractmethod
    def towers(self) -> Mapping[str, str]:
        """The prefix of its parameters' names, by the name of each tower."""

    @property
    @abstractmethod
    def projector(self) -> nn.Module:
        """What makes the language's tokens."""

    @property
    def unused(self) -> Sequence[nn.Module]:
        """What of the model no output depends on. It is not trained."""
        return ()

    @abstractmethod
    def see(self, images: Pictures) -> Tensor:
        """Return the language's tokens of all images, [M, hidden], in order."""

    @contextmanager
    def looking(self, inputs: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the next call of the model see the images of `inputs`; where there are none, a black one to no effect.

        Every rank must take part in what the ranks do together, and every parameter gets a gradient.
        """
        assert "features" not in inputs, "what was seen before is for our own network"
        patches, grids, host = (inputs.get(name) for name in ("patches", "grids", "host_grids"))
        self._is_black = patches is None or grids is None or not len(patches)
        if patches is None or grids is None or self._is_black:
            self._shown = self._black(inputs["tokens"])
        else:
            self._shown = Pictures(patches, grids, host)
        try:
            yield
        finally:
            self._shown = None

    def _black(self, tokens: Tensor) -> Pictures:
        vision, merge = self.spec.vision, self.spec.projector.merge
        side = vision.tile_side or merge
        pixels = CHANNELS * vision.patch * vision.patch
        patches = torch.zeros(side * side, pixels, dtype=torch.uint8, device=tokens.device)
        # One for each, since a copy to the device would wait for it.
        grids, host = (torch.full((1, 2), side, dtype=torch.int32, device=each) for each in (tokens.device, "cpu"))
        return Pictures(patches, grids, host)

    def _place(self, embedding: nn.Module, args: tuple[Any, ...], stream: Tensor) -> Tensor:
        if self._shown is None:
            return stream
        rows = self.see(self._shown).to(stream.dtype)
        if self._is_black:
            return stream + 0 * rows.sum()
        return placed(stream, rows, slots_of(args[0], self.spec.image_token))


def placed(stream: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """Return `stream` [B, T, hidden] with `rows` [M, hidden] at the M positions whose `slots` [B, T] are not negative.

    Every row has its place, so that backward only reads each gradient there; and nobody asks the device how many.
    """
    flat = slots.flatten()
    homes = flat.new_empty(len(rows) + 1)  # the last is for text: nobody reads it
    homes.scatter_(0, flat.where(flat >= 0, len(rows)), torch.arange(len(flat), device=flat.device))
    return stream.flatten(0, 1).index_copy(0, homes[:-1], rows).view_as(stream)


class QwenVisionAdapter(VisionAdapter):
    """Of Qwen2-VL and Qwen2.5-VL: images of any shape, one behind the other."""

    def __init__(self, module: Any, spec: VlmSpec) -> None:
        super().__init__(module, spec)
        pack_images(self._model.visual)
        stem = self._model.visual.patch_embed.proj
        stem.forward = MethodType(_product, stem)

    @property
    def towers(self) -> Mapping[str, str]:
        return {"vision": "model.visual.", "projector": "model.visual.merger.", "language": "model.language_model."}

    @property
    def projector(self) -> nn.Module:
        return self._model.visual.merger

    def see(self, images: Pictures) -> Tensor:
        """See `VisionAdapter`. The tower is told what it would find out on its own by waiting for the device."""
        vision, merge, (patches, grids) = (
            self.spec.vision,
            self.spec.projector.merge,
            (images.patches, images.grids),
        )
        layout = lay_out(vision, merge, patches, grids, host=images.host)
        told: dict[str, Any] = {
            "position_ids": rows_and_columns(grids, len(patches), merge),
            "cu_seqlens": layout.whole,
            "max_seqlen": 0,  # nobody asks: our attention looks at the segments
        }
        if layout.windows is not None and layout.order is not None:
            told["window_index"] = layout.order[:: merge * merge] // (merge * merge)
            told |= {"cu_window_seqlens": layout.windows, "max_window_seqlen": 0}
        # An image is a film that stands still.
        pixels = normed(patches, vision.ends).unflatten(1, (CHANNELS, 1, -1)).expand(-1, -1, vision.frames, -1)
        return self._model.visual(pixels.flatten(1), grid_thw=F.pad(grids, (1, 0), value=1), **told).pooler_output


def _product(stem: nn.Conv3d, patches: Tensor) -> Tensor:
    """Return what a convolution makes of patches of its own size, [P, features]: one product."""
    return F.linear(patches.flatten(1), stem.weight.flatten(1), stem.bias)


class LlavaVisionAdapter(VisionAdapter):
    """Of LLaVA 1.5: squares of one size, and no layers behind the one that its tokens are taken from."""

    @property
    def towers(self) -> Mapping[str, str]:
        return {
            "vision": "model.vision_tower.",
            "projector": "model.multi_modal_projector.",
            "language": "model.language_model.",
        }

    @property
    def projector(self) -> nn.Module:
        return self._model.multi_modal_projector

    @property
    def unused(self) -> Sequence[nn.Module]:
        tower = self._model.vision_tower
        return (*tower.encoder.layers[self.spec.vision.layers :], tower.post_layernorm)

    def see(self, images: Pictures) -> Tensor:
        vision, tower, side = self.spec.vision, self._model.vision_tower, self.spec.vision.tile_side
        squares = normed(images.patches, vision.ends)
        squares = squares.view(-1, side, side, CHANNELS, vision.patch, vision.patch).permute(0, 3, 1, 4, 2, 5)
        x = tower.pre_layrnorm(tower.embeddings(squares.reshape(-1, CHANNELS, vision.tile, vision.tile)))
        for layer in tower.encoder.layers[: vision.layers]:
            x = layer(x, None)
        return self.projector(x[:, 1:]).flatten(0, 1)  # without the class token


VISION_ADAPTERS = {"qwen2_vl": QwenVisionAdapter, "qwen2_5_vl": QwenVisionAdapter, "llava": LlavaVisionAdapter}
