"""Turns image files into the patches of a vision tower. Does not import torch."""

from trimaran.data.vision.decode import BadImageError, pixels_of, upright_size
from trimaran.data.vision.grid_positions import grid_positions
from trimaran.data.vision.image_grid import ImageSizes, grids_of, measure_images
from trimaran.data.vision.patches import cut_patches, fill_patches, grey_patches

__all__ = [
    "BadImageError",
    "ImageSizes",
    "cut_patches",
    "fill_patches",
    "grey_patches",
    "grid_positions",
    "grids_of",
    "measure_images",
    "pixels_of",
    "upright_size",
]
