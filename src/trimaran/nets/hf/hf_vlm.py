"""Hugging Face vision-language models (Qwen2-VL, Qwen2.5-VL, LLaVA, InternVL), unchanged, on our images."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.core import UserError
from trimaran.models import CHANNELS, Spec, VlmSpec
from trimaran.nets.decoder.key_value_cache import CacheExtension
from trimaran.nets.hf.hf import HfNetwork, hf_network
from trimaran.nets.hf.hf_attention import pack_images, takes_scope
from trimaran.nets.hf.hf_kinds import vlm_difference
from trimaran.nets.paged_cache import PagedExtension
from trimaran.nets.vlm.patch_layout import ImagePatches, black_image, layout_patches, patch_positions
from trimaran.nets.vlm.vision import image_token_index, normalise_patches


class VisionAdapter(ABC):
    """Encodes the images of a micro-batch when its text is embedded, and inserts the image tokens into the stream.

    That happens inside the model's own forward, where DDP and FSDP expect every use of its parameters. The model's own
    code would count image tokens on the device, and synchronise with it in forward and backward.
    """

    towers: ClassVar[Mapping[str, str]]  # the prefix of its parameters' names, by the name of each tower

    def __init__(self, module: Any, spec: VlmSpec) -> None:
        self._model, self.spec = module.model, spec
        self._images: ImagePatches | None = None
        self._is_black = False
        module.get_input_embeddings().register_forward_hook(self._insert)
        for part in self.unused:
            part.requires_grad_(False)

    @property
    def projector(self) -> nn.Module:
        """The module that makes image tokens of patch features."""
        return self._model.get_submodule(self.towers["projector"].removeprefix("model.").removesuffix("."))

    @property
    def unused(self) -> Sequence[nn.Module]:
        """The modules that do not affect the output. They are not trained."""
        return ()

    @abstractmethod
    def encode(self, images: ImagePatches) -> Tensor:
        """Return the image tokens of all images, [M, hidden], in order."""

    @contextmanager
    def with_images(self, inputs: Mapping[str, Tensor]) -> Iterator[None]:
        """Pass the images to the model's next call, or a black one, so that each parameter gets a gradient."""
        assert "features" not in inputs, "only our own network takes cached features"
        patches, grids, host_grids = (inputs.get(name) for name in ("patches", "grids", "host_grids"))
        self._is_black = patches is None or grids is None or not len(patches)
        if patches is None or grids is None or self._is_black:
            side = self.spec.vision.tile_side or self.spec.projector.merge
            self._images = black_image(self.spec.vision, side, inputs["tokens"].device)
        else:
            arranged = (inputs.get(name) for name in ("token_sources", "token_weights"))
            self._images = ImagePatches(patches, grids, host_grids, *arranged)
        try:
            yield
        finally:
            self._images = None

    def _insert(self, embedding: nn.Module, args: tuple[Any, ...], stream: Tensor) -> Tensor:
        if self._images is None:
            return stream
        rows = self.encode(self._images).to(stream.dtype)
        if self._is_black:
            return stream + 0 * rows.sum()
        return insert_rows(stream, rows, image_token_index(args[0], self.spec.image_token))


def insert_rows(stream: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """Return `stream` [B, T, hidden] with `rows` [M, hidden] at the M positions whose `index` [B, T] is not negative.

    Every row has one position, so backward only reads its gradient there, and nothing synchronises with the device.
    """
    flat = index.flatten()
    positions = flat.new_empty(len(rows) + 1)  # all text positions write to the last entry, which is not used
    positions.scatter_(0, flat.where(flat >= 0, len(rows)), torch.arange(len(flat), device=flat.device))
    return stream.flatten(0, 1).index_copy(0, positions[:-1], rows).view_as(stream)


class QwenVisionAdapter(VisionAdapter):
    """Adapter of Qwen2-VL and Qwen2.5-VL: concatenated images of any shape."""

    towers: ClassVar[Mapping[str, str]] = {
        "vision": "model.visual.",
        "projector": "model.visual.merger.",
        "language": "model.language_model.",
    }

    def __init__(self, module: Any, spec: VlmSpec) -> None:
        super().__init__(module, spec)
        pack_images(self._model.visual)
        stem = self._model.visual.patch_embed.proj
        # The convolution of patches of the kernel's own size, [P, features], is one matmul.
        stem.forward = MethodType(
            lambda own, patches: F.linear(patches.flatten(1), own.weight.flatten(1), own.bias), stem
        )

    def encode(self, images: ImagePatches) -> Tensor:
        """See `VisionAdapter`. Passes values that the tower would otherwise compute with device synchronisation."""
        vision, merge, patches, grids = self.spec.vision, self.spec.projector.merge, images.patches, images.grids
        layout = layout_patches(vision, merge, patches, grids, host_grids=images.host_grids)
        arguments: dict[str, Any] = {
            "position_ids": patch_positions(grids, len(patches), merge),
            "cu_seqlens": layout.image_segments,
            "max_seqlen": 0,  # not used: our attention takes it from the segments
        }
        if layout.window_segments is not None and layout.order is not None:
            arguments["window_index"] = layout.order[:: merge * merge] // (merge * merge)
            arguments |= {"cu_window_seqlens": layout.window_segments, "max_window_seqlen": 0}
        pixels = normalise_patches(patches, vision.ends)
        if pixels.shape[1] == CHANNELS * vision.patch * vision.patch:  # an image is a video of equal frames
            pixels = pixels.unflatten(1, (CHANNELS, 1, -1)).expand(-1, -1, vision.frames, -1)
        arguments["grid_thw"] = F.pad(grids, (1, 0), value=1)
        return self._model.visual(pixels.flatten(1), **arguments).pooler_output


class LlavaVisionAdapter(VisionAdapter):
    """Adapter of LLaVA 1.5: square images of one size. Layers after the one that it takes features from do not run."""

    towers: ClassVar[Mapping[str, str]] = {
        "vision": "model.vision_tower.",
        "projector": "model.multi_modal_projector.",
        "language": "model.language_model.",
    }

    @property
    def unused(self) -> Sequence[nn.Module]:
        tower = self._model.vision_tower
        return (*tower.encoder.layers[self.spec.vision.layers :], tower.post_layernorm)

    def encode(self, images: ImagePatches) -> Tensor:
        vision, tower = self.spec.vision, self._model.vision_tower
        x = tower.pre_layrnorm(tower.embeddings(squares_of(images.patches, self.spec)))
        for layer in tower.encoder.layers[: vision.layers]:
            x = layer(x, None)
        return self.projector(x[:, 1:]).flatten(0, 1)  # without the class token


class InternVisionAdapter(LlavaVisionAdapter):
    """Adapter of InternVL: square tiles of one size."""

    @property
    def unused(self) -> Sequence[nn.Module]:
        return self._model.vision_tower.encoder.layer[self.spec.vision.layers :]

    def encode(self, images: ImagePatches) -> Tensor:
        vision, tower = self.spec.vision, self._model.vision_tower
        x = tower.embeddings(squares_of(images.patches, self.spec))
        for layer in tower.encoder.layer[: vision.layers]:
            x = layer(x)
        squares = x[:, 1:].unflatten(1, (vision.tile_side, vision.tile_side))  # without the class token
        return self.projector(self._model.pixel_shuffle(squares).flatten(1, 2)).flatten(0, 1)


class OneVisionAdapter(LlavaVisionAdapter):
    """Adapter of LLaVA-OneVision: tiles of one size, whose tokens are put together to rows that end with a newline."""

    @property
    def unused(self) -> Sequence[nn.Module]:
        return (self._model.vision_tower.post_layernorm,)

    def encode(self, images: ImagePatches) -> Tensor:
        tower, vision, side = self._model.vision_tower, self.spec.vision, self.spec.vision.tile_side
        # Tiles [tiles, channel, row, column] of complete patches.
        tiles = normalise_patches(images.patches, vision.ends).view(
            -1, side, side, CHANNELS, vision.patch, vision.patch
        )
        pixels = side * vision.patch
        x = tower.embeddings(tiles.permute(0, 3, 1, 4, 2, 5).reshape(-1, CHANNELS, pixels, pixels))
        for layer in tower.encoder.layers:
            x = layer(x, None)
        rows, newline = self.projector(x).flatten(0, 1), self._model.image_newline[None]
        if images.token_sources is None or images.token_weights is None:  # the black image
            return rows + 0 * newline.to(rows.dtype)
        rows = torch.cat([rows, newline.to(rows.dtype)])
        sources = images.token_sources.long()
        sources = sources.where(sources >= 0, len(rows) - 1)
        return F.embedding_bag(sources, rows, per_sample_weights=images.token_weights.to(rows.dtype), mode="sum")


def squares_of(patches: Tensor, spec: VlmSpec) -> Tensor:
    """Return the normalised tiles [tiles, channel, row, column] of `patches`, which are in groups of one token each."""
    vision, merge = spec.vision, spec.projector.merge
    groups = vision.tile_side // merge
    squares = normalise_patches(patches, vision.ends)
    squares = squares.view(-1, groups, groups, merge, merge, CHANNELS, vision.patch, vision.patch)
    return squares.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, CHANNELS, vision.tile, vision.tile)


VISION_ADAPTERS = {
    "qwen2_vl": QwenVisionAdapter,
    "qwen2_5_vl": QwenVisionAdapter,
    "llava": LlavaVisionAdapter,
    "internvl": InternVisionAdapter,
    "llava_onevision": OneVisionAdapter,
}


try:
    from transformers import vision_utils
except ImportError:  # before transformers 5 a tower takes no image boundaries
    vision_utils = None


@dataclass(frozen=True, slots=True)
class HfVlmNetwork(HfNetwork):
    """A Hugging Face vision-language model. Its `adapter` encodes the images."""

    spec: VlmSpec
    adapter: VisionAdapter

    @property
    def vocabulary(self) -> int:
        return self.spec.vocab

    @property
    def max_seq_len(self) -> int:
        return self.spec.max_seq_len

    @property
    def towers(self) -> Mapping[str, str]:
        return self.adapter.towers

    def forward(self, inputs: Mapping[str, Tensor], *stream: Tensor) -> tuple[Tensor, Tensor]:
        with self.adapter.with_images(inputs):
            return HfNetwork.forward(self, inputs)

    def _extended(
        self, inputs: Mapping[str, Tensor], extension: CacheExtension | PagedExtension, kept: Tensor | int | None
    ) -> Tensor:
        """See `HfNetwork`. The vision tower does not run without images."""
        if self.spec.sections and "positions" not in inputs:
            inputs = {**inputs, "positions": extension.positions.expand(3, -1, -1)}
        with self.adapter.with_images(inputs) if "patches" in inputs else nullcontext():
            return HfNetwork._extended(self, inputs, extension, kept)

    def _attention_arguments(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        arguments = HfNetwork._attention_arguments(self, inputs)
        if not self.spec.sections:
            return arguments
        positions = inputs.get("positions")
        if positions is None:
            positions = arguments["position_ids"].expand(3, -1, -1)
        return arguments | {"position_ids": positions}


def network_of_hf(module: nn.Module, spec: Spec | None) -> HfNetwork:
    """Return the network of a Hugging Face model, with or without vision. See `hf_network`."""
    network = hf_network(module, spec)
    kind = module.config.model_type  # pyrefly: ignore[missing-attribute]
    if kind not in VISION_ADAPTERS:
        return network
    if spec is None or spec.vision is None:
        difference = vlm_difference(module.config) or "it has no spec"
        raise _no_images(network, f"its configuration is not supported ({difference})")
    if vision_utils is None:
        raise _no_images(network, "that needs transformers 5")
    if not takes_scope(module):
        raise _no_images(network, "it has its own attention implementation")
    adapter = VISION_ADAPTERS[kind](module, spec)
    # In the order of the forward: vision, the projector, language.
    names = {id(part): name for name, part in module.named_modules()}
    language = [block for block in network.blocks if names[id(block)].startswith(adapter.towers["language"])]
    vision = [block for block in network.blocks if block not in (*language, *adapter.unused)]
    blocks = (*vision, adapter.projector, *language)
    return HfVlmNetwork(module, blocks, spec, network.architecture, network.logits_head, adapter)


def _no_images(network: HfNetwork, reason: str) -> UserError:
    return UserError("M035.cannot-trained", where="model.path", architecture=network.architecture, reason=reason)
