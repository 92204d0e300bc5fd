"""The reference model that sees: a vision tower, a projector, our decoder, and images placed in the text."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.models.vlm_spec import VlmSpec
from trimaran.nets.attention import Rotation, grid_rotation_at
from trimaran.nets.attention_context import Context
from trimaran.nets.decoder import Decoder
from trimaran.nets.image_balancing import ImageBalancer, Pictures
from trimaran.nets.patch_layout import PatchLayout, empty_group, lay_out
from trimaran.nets.projector import Projector, TokenSlots, slots_of
from trimaran.nets.vision import VisionTower


class Vlm(nn.Module):
    """Tokens and patches in, logits out; or one stage of it, which holds only some of the blocks.

    The blocks are the vision layers, the projector and the decoder layers. The stage with the projector has the
    embedding too and makes the language's stream. A tower of which a stage has nothing is None there.
    """

    def __init__(self, spec: VlmSpec, blocks: range | None = None) -> None:
        super().__init__()
        held = range(spec.layers) if blocks is None else blocks
        bridge = spec.vision.layers
        self.spec, self.held, self.context, self.deal = spec, held, Context(), ImageBalancer()
        seen, joins = range(held.start, min(held.stop, bridge)), bridge in held
        spoken = range(max(held.start - bridge - 1, 0), max(held.stop - bridge - 1, 0))
        self.vision = VisionTower(spec.vision, spec.projector.merge, seen) if len(seen) else None
        self.projector = Projector(spec) if joins else None
        self.language = Decoder(spec.language, spoken, embeds=joins) if joins or len(spoken) else None
        if self.language is not None and joins:
            self.language.place = TokenSlots()

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        """The blocks that are here, in the order of the forward."""
        vision = self.vision.blocks if self.vision is not None else ()
        projector = (self.projector,) if self.projector is not None else ()
        return (*vision, *projector, *(self.language.blocks if self.language is not None else ()))

    def use_context(self, context: Context) -> None:
        """Hold a part of each sequence from now on. Images stay whole."""
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
        **images: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return logits [B, T, vocab] and the balance loss, as `Decoder` does.

        `images` has `patches` u8 [P, channel x row x column] of all images and their `grids` [N, 2], and perhaps
        `host_grids`, the same on the host; as many positions of `tokens` are the image token as patches merge into. Or
        it has `features` [M, width], what `encode` returned for them before. `positions` [3, B, T] are time, row and
        column. A stage that ends before the projector returns the vision stream, padded.
        """
        placed = None
        if self.vision is not None or self.projector is not None:
            seen = self._see(stream, tokens, images)
            if self.projector is None:
                return seen, torch.zeros((), device=tokens.device)
            placed, stream = (self._projected(seen, tokens, images), self._slots(tokens)), ()
        assert self.language is not None, "a stage behind the projector has layers of the language"
        rotation = None if positions is None else self._rotation(positions)
        return self.language(
            *stream, tokens=tokens, documents=documents, lengths=lengths, rotation=rotation, placed=placed
        )

    def encode(self, patches: Tensor, grids: Tensor) -> Tensor:
        """Return what the projector takes in for each image token, [M, width], in order. The tower must be whole."""
        assert self.vision is not None
        assert self.vision.is_whole
        layout = lay_out(self.spec.vision, self.spec.projector.merge, patches, grids)
        return layout.groups(self.vision(patches=patches, layout=layout), self.spec.projector.merge)

    def bound(self, tokens: Tensor) -> int:
        """Return the most positions that the vision stream of a micro-batch can have: all of its tokens may be seen."""
        vision, patches = self.spec.vision, tokens.numel() * self.spec.projector.merge**2
        if not vision.ends.class_token:
            return patches
        return patches + max(1, patches // vision.tile_side**2)

    def _see(self, stream: tuple[Tensor, ...], tokens: Tensor, images: Mapping[str, Tensor | None]) -> Tensor:
        """Return what the projector takes in, or, on a stage without it, the padded vision stream."""
        vision, merge = self.spec.vision, self.spec.projector.merge
        if (features := images.get("features")) is not None:
            return self._remembered(features, tokens)
        mine = self.deal.mine(self._shown(tokens, images), self._black(tokens))
        layout = lay_out(vision, merge, mine.patches, mine.grids, host=mine.host)
        given = tuple(each[:, : layout.length] for each in stream)
        seen = given[0] if self.vision is None else self._watch(*given, patches=mine.patches, layout=layout)
        if self.projector is None:
            return F.pad(seen, (0, 0, 0, self.bound(tokens) - layout.length))
        return layout.groups(seen, merge)

    def _projected(self, seen: Tensor, tokens: Tensor, images: Mapping[str, Tensor | None]) -> Tensor:
        """Return the language's tokens of all images, [M, hidden], in order."""
        assert self.projector is not None
        if images.get("features") is not None:
            return self.projector(seen)
        shown, merged = self._shown(tokens, images), self.spec.projector.merge**2
        if self.deal.past_projector:
            return self.deal.whole(self.projector(seen), shown, per_token=merged)
        return self.projector(self.deal.whole(seen, shown, per_token=merged))

    def _shown(self, tokens: Tensor, images: Mapping[str, Tensor | None]) -> Pictures:
        """Return the images of a micro-batch; where there are none, one black group."""
        patches, grids = images.get("patches"), images.get("grids")
        if patches is None or not len(patches):
            return self._black(tokens)
        assert grids is not None, "patches come with their grids"
        host = images.get("host_grids")
        return Pictures(patches, grids, None if host is None else torch.as_tensor(host))

    def _black(self, tokens: Tensor) -> Pictures:
        return Pictures(*empty_group(self.spec.vision, self.spec.projector.merge, tokens.device))

    def _watch(self, *stream: Tensor, patches: Tensor, layout: PatchLayout) -> Tensor:
        """Return the vision stream after the layers here.

        Nothing is kept for the backward of a frozen tower that nothing trained stands before.
        """
        assert self.vision is not None
        trained = any(each.requires_grad for each in (*stream, *self.vision.parameters()))
        with nullcontext() if trained else torch.no_grad():
            return self.vision(*stream, patches=patches, layout=layout)

    def _remembered(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Return features as the projector takes them; at least one, which then nobody looks at."""
        if self.projector is None:  # nothing to do for the vision layers
            return torch.zeros(1, self.bound(tokens), self.spec.vision.hidden, device=tokens.device)
        if features.dtype == torch.uint16:
            features = features.view(torch.bfloat16)  # numpy, where they come from, has no such numbers
        return features.float() if len(features) else torch.zeros(1, self.spec.feature_width, device=tokens.device)

    def _slots(self, tokens: Tensor) -> Tensor:
        return self.context.mine(slots_of(tokens, self.spec.image_token))

    def _rotation(self, positions: Tensor) -> Rotation:
        """Return the rotation of this rank's tokens at `positions` [3, B, T]: time, row, column."""
        language = self.spec.language
        mine = torch.stack([self.context.mine(each) for each in positions])
        return grid_rotation_at(mine, language.block.rope, language.head_dim, self.spec.sections)
