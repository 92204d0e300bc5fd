"""The reference vision-language model: a vision tower, a projector and our decoder."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.models import VlmSpec
from trimaran.nets.decoder.attention import grid_rotation_at
from trimaran.nets.decoder.attention_context import Context
from trimaran.nets.decoder.decoder import Decoder
from trimaran.nets.decoder.key_value_cache import CacheExtension
from trimaran.nets.paged_cache import PagedExtension
from trimaran.nets.vlm.patch_layout import ImageAssignment, ImagePatches, black_image, layout_patches
from trimaran.nets.vlm.vision import InsertImageTokens, Projector, VisionTower, image_token_index


class Vlm(nn.Module):
    """Maps tokens and patches to logits; or one pipeline stage, which holds only some of the blocks.

    The blocks are the vision layers, the projector and the decoder layers. The stage with the projector also has the
    embedding, and makes the stream of the language model. A tower without blocks on a stage is None there.
    """

    def __init__(self, spec: VlmSpec, blocks: range | None = None) -> None:
        super().__init__()
        held = range(spec.layers) if blocks is None else blocks
        projector = spec.vision.layers  # the block number of the projector
        self.spec, self.held, self.context = spec, held, Context()
        self.image_assignment = ImageAssignment()
        vision, joins = range(held.start, min(held.stop, projector)), projector in held
        language = range(max(held.start - projector - 1, 0), max(held.stop - projector - 1, 0))
        taps = spec.projector.deepstack
        self.vision = VisionTower(spec.vision, spec.projector.merge, vision, taps) if len(vision) else None
        self.projector = Projector(spec) if joins else None
        self.language = Decoder(spec.language, language, embeds=joins) if joins or len(language) else None
        if self.language is not None and joins:
            self.language.place = InsertImageTokens()

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        vision = self.vision.blocks if self.vision is not None else ()
        projector = (self.projector,) if self.projector is not None else ()
        return (*vision, *projector, *(self.language.blocks if self.language is not None else ()))

    def use_context(self, context: Context) -> None:
        """Hold a part of each sequence from now on. Images are not split."""
        self.context = context
        if self.language is not None:
            self.language.use_context(context)

    def forward(
        self,
        *stream: Tensor,
        tokens: Tensor,
        documents: Tensor | None = None,
        lengths: Sequence[int] | None = None,
        positions: Tensor | None = None,
        extension: CacheExtension | PagedExtension | None = None,
        **images: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return logits [B, T, vocab] and the balance loss, as `Decoder` does.

        `images` has the `patches` u8 [P, channel x row x column] of all images and their `grids` [N, 2], and optionally
        `host_grids`, a copy on the host. The number of image tokens in `tokens` is the number of merged patches.
        Alternatively it has `features` [M, width], the result of an earlier `encode`. `positions` [3, B, T] are time,
        row and column. A stage that ends before the projector returns the vision stream, padded. The vision tower does
        not run for an `extension` of a cache without images.
        """
        placed: tuple[Tensor, Tensor] | None = None
        deep: Sequence[Tensor] = ()
        is_text = extension is not None and images.get("patches") is None and images.get("features") is None
        if not is_text and (self.vision is not None or self.projector is not None):
            features = self._vision_features(stream, tokens, images)
            if self.projector is None:
                return features, torch.zeros((), device=tokens.device)
            rows, *deep = self._project(features, tokens, images).chunk(self.num_projections, -1)
            placed, stream = (rows, self.context.shard(image_token_index(tokens, self.spec.image_token))), ()
        assert self.language is not None, "a stage after the projector has decoder layers"
        rotation = None
        if positions is not None:
            decoder, local = self.spec.language, torch.stack([self.context.shard(each) for each in positions])
            rotation = grid_rotation_at(local, decoder.block.rope, decoder.head_dim, self.spec.sections)
        # The tokens of deepstack are added after the first layers. Those of layers on later stages accompany the
        # stream, in its last dimension.
        pending: list[Tensor] = []
        num_in, num_out = (0, 0) if is_text else self.num_pending
        if placed is not None and deep:
            assert self.language.place is not None
            zero = deep[0].new_zeros(1)  # at text positions
            pending = [self.language.place(zero, each, placed[1]) for each in deep]
        elif num_in and placed is None:
            first, *pending = stream[0].chunk(1 + num_in, -1)
            stream = (first,)
        now, later = pending[: len(pending) - num_out], pending[len(pending) - num_out :]
        out, balance = self.language(
            *stream,
            tokens=tokens,
            documents=documents,
            lengths=lengths,
            rotation=rotation,
            placed=placed,
            added=now,
            extension=extension,
        )
        return torch.cat([out, *later], -1) if later else out, balance

    @property
    def num_projections(self) -> int:
        """How many projectors there are, with those of deepstack."""
        return 1 + len(self.spec.projector.deepstack)

    @property
    def num_pending(self) -> tuple[int, int]:
        """How many tensors of deepstack accompany the language stream into this stage, and out of it."""
        taps, first = len(self.spec.projector.deepstack), self.spec.vision.layers + 1
        into, out = (max(0, taps - max(each - first, 0)) for each in (self.held.start, self.held.stop))
        return into, out

    def encode(self, patches: Tensor, grids: Tensor) -> Tensor:
        """Return the projector's input for each image token, [M, width], in order. Needs the complete vision tower."""
        assert self.vision is not None
        assert self.vision.is_complete
        layout = layout_patches(self.spec.vision, self.spec.projector.merge, patches, grids)
        stream = self.vision(patches=patches, layout=layout)
        return layout.merged_patches(stream, self.spec.projector.merge, self.num_projections)

    def max_vision_length(self, tokens: Tensor) -> int:
        """Return the maximum length of the vision stream of a micro-batch: all its tokens may be image tokens."""
        vision, patches = self.spec.vision, tokens.numel() * self.spec.projector.merge**2
        if not vision.ends.class_token:
            return patches
        return patches + max(1, patches // vision.tile_side**2)

    def _vision_features(
        self, stream: tuple[Tensor, ...], tokens: Tensor, images: Mapping[str, Tensor | None]
    ) -> Tensor:
        """Return the projector's input; on a stage without the projector, the padded vision stream."""
        vision, merge = self.spec.vision, self.spec.projector.merge
        if (features := images.get("features")) is not None:
            # Cached features as the projector takes them; one unused row of zeros if there are none.
            if self.projector is None:  # the vision layers have nothing to do
                width = self.spec.vision.hidden * self.num_projections
                return torch.zeros(1, self.max_vision_length(tokens), width, device=tokens.device)
            if features.dtype == torch.uint16:
                features = features.view(torch.bfloat16)  # they come from numpy, which has no bf16
            width = self.spec.feature_width * self.num_projections
            return features.float() if len(features) else torch.zeros(1, width, device=tokens.device)
        local = self.image_assignment.local_images(self._images(tokens, images), self._black_image(tokens))
        layout = layout_patches(vision, merge, local.patches, local.grids, host_grids=local.host_grids)
        stream = tuple(each[:, : layout.length] for each in stream)
        if self.vision is None:
            x = stream[0]
        else:  # nothing is saved for backward if neither the tower nor its input requires a gradient
            trained = any(each.requires_grad for each in (*stream, *self.vision.parameters()))
            with nullcontext() if trained else torch.no_grad():
                x = self.vision(*stream, patches=local.patches, layout=layout)
        if self.projector is None:
            return F.pad(x, (0, 0, 0, self.max_vision_length(tokens) - layout.length))
        return layout.merged_patches(x, merge, self.num_projections)

    def _project(self, features: Tensor, tokens: Tensor, images: Mapping[str, Tensor | None]) -> Tensor:
        assert self.projector is not None
        if images.get("features") is not None:
            return self.projector(features)
        gather = partial(
            self.image_assignment.gather, images=self._images(tokens, images), per_token=self.spec.projector.merge**2
        )
        after = self.image_assignment.gathers_after_projector
        return gather(self.projector(features)) if after else self.projector(gather(features))

    def _images(self, tokens: Tensor, images: Mapping[str, Tensor | None]) -> ImagePatches:
        """Return the images of a micro-batch; a black one if there are none."""
        patches, grids = images.get("patches"), images.get("grids")
        if patches is None or not len(patches):
            return self._black_image(tokens)
        assert grids is not None, "patches come with their grids"
        host_grids = images.get("host_grids")
        return ImagePatches(patches, grids, None if host_grids is None else torch.as_tensor(host_grids))

    def _black_image(self, tokens: Tensor) -> ImagePatches:
        return black_image(self.spec.vision, self.spec.projector.merge, tokens.device)
