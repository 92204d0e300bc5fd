"""From the bytes of a picture to the patches that a vision tower takes. Without torch."""

from trimaran.data.vision.decode import BadPictureError, pixels_of, upright_size
from trimaran.data.vision.grid_positions import grid_positions
from trimaran.data.vision.image_grid import PictureSizes, grids_of, measure_pictures
from trimaran.data.vision.patches import cut_patches, fill_patches, grey_patches

__all__ = [
    "BadPictureError",
    "PictureSizes",
    "cut_patches",
    "fill_patches",
    "grey_patches",
    "grid_positions",
    "grids_of",
    "measure_pictures",
    "pixels_of",
    "upright_size",
]
