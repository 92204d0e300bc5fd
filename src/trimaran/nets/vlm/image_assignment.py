"""Which images of a micro-batch a rank encodes."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ImagePatches:
    """The patches of all images, concatenated, and the images' grids [N, 2]; `host_grids` is a copy on the host.

    `token_sources` [M, 4] are the rows of the projector's output that a token is the sum of, with `token_weights`; -1
    is the newline. Without them each row is a token.
    """

    patches: Tensor
    grids: Tensor
    host_grids: Tensor | None = None
    token_sources: Tensor | None = None
    token_weights: Tensor | None = None


class ImageAssignment:
    """Every rank encodes all images. `parallel/axes/image_split.py` replaces it by one that splits them over ranks."""

    gathers_after_projector = False  # whether rows are gathered after the projector, or before it

    def local_images(self, images: ImagePatches, empty: ImagePatches) -> ImagePatches:
        """Return the images that this rank encodes; `empty` if it has none."""
        return images

    def gather(self, local: Tensor, images: ImagePatches, *, per_token: int) -> Tensor:
        """Return the rows of all `images` in order, given this rank's rows; a row covers `per_token` patches."""
        return local
