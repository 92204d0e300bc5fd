"""Which images of a micro-batch a rank looks at."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pictures:
    """Patches of images, one image behind the other, and their grids [N, 2]; `host` has the grids on the host."""

    patches: Tensor
    grids: Tensor
    host: Tensor | None = None


class ImageBalancer:
    """All of them. Where ranks of a tensor-parallel group hold a whole tower each, they share the images out."""

    past_projector = False  # whether what the ranks see is put together behind the projector, or before it

    def mine(self, images: Pictures, empty: Pictures) -> Pictures:
        """Return this rank's images, or `empty` where there is none for it."""
        return images

    def whole(self, mine: Tensor, images: Pictures, *, per_token: int) -> Tensor:
        """Return the rows of all `images` in order, of which `mine` are this rank's; one for `per_token` patches."""
        return mine
