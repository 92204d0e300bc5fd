"""Image decoding, patches, grids and positions, compared with the processors of the models."""

import io
import struct
import zlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from trimaran.core import ImageRules
from trimaran.data import (
    MAX_PIXELS,
    BadImageError,
    cut_patches,
    fill_patches,
    grid_positions,
    grids_of,
    measure_images,
    pixels_of,
    upright_size,
)

QWEN = ImageRules(patch=14, merge=2, image_token=0, max_pixels=1280 * 28 * 28)
INTERN = ImageRules(patch=14, merge=2, image_token=0, variant="tiled", tile=448, max_tiles=12)
LLAVA = ImageRules(patch=14, merge=1, image_token=0, variant="tiled", tile=336, max_tiles=1)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an image with coarse and fine structure and no symmetry."""
    draw = np.random.default_rng(seed)
    coarse = Image.fromarray(draw.integers(0, 256, (5, 7, 3), dtype=np.uint8)).resize((width, height))
    noise = draw.integers(-12, 13, (height, width, 3))
    return Image.fromarray((np.asarray(coarse).astype(int) + noise).clip(0, 255).astype(np.uint8))


def some_sizes() -> np.ndarray:
    draw = np.random.default_rng(1)
    return np.concatenate([draw.integers(10, 200, (200, 2)), draw.integers(10, 4000, (400, 2)), [[28, 28], [42, 42]]])


def test_native_grids_are_those_of_qwen2_vl() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize  # noqa: PLC0415

    sizes = some_sizes()
    measured = measure_images(sizes, QWEN)
    for number, (width, height) in enumerate(sizes.tolist()):
        if max(width, height) > 200 * min(width, height):
            continue  # Qwen2-VL refuses those
        tall, wide = smart_resize(height, width, 28, QWEN.min_pixels, QWEN.max_pixels)
        assert grids_of((width, height), QWEN).tolist() == [[tall // 14, wide // 14]]
        assert measured.patches[number] == tall * wide // 14**2
        assert measured.tokens[number] == tall * wide // 28**2
        assert measured.patch_pairs[number] == measured.patches[number] ** 2


def test_tiles_are_those_of_internvl() -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas  # noqa: PLC0415

    sizes = some_sizes()
    measured = measure_images(sizes, INTERN)
    for number, (width, height) in enumerate(sizes.tolist()):
        columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), 1, 12)
        tiles = rows * columns + (rows * columns > 1)
        assert grids_of((width, height), INTERN).tolist() == [[32, 32]] * tiles
        assert measured.tokens[number] == 256 * tiles
        assert measured.patch_pairs[number] == tiles * 1024**2


def test_a_single_tile_is_the_full_image() -> None:
    assert grids_of((1000, 300), LLAVA).tolist() == [[24, 24]]
    assert measure_images(np.array([[1000, 300]]), LLAVA).tokens.tolist() == [576]


@pytest.mark.parametrize("size", [(200, 120), (61, 333), (30, 20)])
def test_patches_are_those_of_qwen2_vl(size: tuple[int, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # noqa: PLC0415

    image = noise_image(*size)
    theirs = Qwen2VLImageProcessorPil(do_rescale=False, do_normalize=False)(images=image, return_tensors="np")
    _, rows, columns = theirs["image_grid_thw"][0].tolist()
    assert grids_of(size, QWEN).tolist() == [[rows, columns]]
    ours = np.empty((rows * columns, 3 * 14 * 14), dtype=np.uint8)
    fill_patches(encoded(image), size, QWEN, ours)
    wanted = theirs["pixel_values"].reshape(-1, 3, 2, 14, 14)[:, :, 0].reshape(len(ours), -1)
    assert np.array_equal(ours, wanted)


def test_tiles_come_after_a_thumbnail() -> None:
    rules = ImageRules(patch=2, merge=2, image_token=0, variant="tiled", tile=8, max_tiles=4)
    colours = np.zeros((16, 16, 3), dtype=np.uint8)
    colours[:8, :8], colours[:8, 8:], colours[8:, :8], colours[8:, 8:] = 10, 20, 30, 40
    out = np.empty((5 * 16, 12), dtype=np.uint8)
    assert grids_of((16, 16), rules).tolist() == [[4, 4]] * 5
    fill_patches(encoded(Image.fromarray(colours)), (16, 16), rules, out)
    assert [np.unique(tile).tolist() for tile in out[16:].reshape(4, 16, 12)] == [[10], [20], [30], [40]]
    corners = out[:16].reshape(2, 2, 2, 2, 3, 2, 2)
    assert [corners[row, column].mean().round() for row in (0, 1) for column in (0, 1)] == [10, 20, 30, 40]


def test_patches_of_a_merge_group_are_adjacent() -> None:
    rules = ImageRules(patch=2, merge=2, image_token=0)
    pixels = np.arange(4 * 8 * 3, dtype=np.uint8).reshape(4, 8, 3)
    out = np.empty((8, 12), dtype=np.uint8)
    cut_patches(pixels, rules, out)
    for number, (row, column) in enumerate([(0, 0), (0, 2), (2, 0), (2, 2), (0, 4), (0, 6), (2, 4), (2, 6)]):
        patch = pixels[row : row + 2, column : column + 2]
        assert out[number].tolist() == patch.transpose(2, 0, 1).ravel().tolist()


def test_positions_are_those_of_qwen2_vl() -> None:
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel  # noqa: PLC0415

    grids = [(4, 6), (2, 2), (8, 2)]
    tokens = [1, 1, *[9] * 6, 1, *[9], 1, 1, 1, *[9] * 4]
    model: Any = Qwen2VLModel
    theirs = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    theirs.get_vision_position_ids = partial(model.get_vision_position_ids, theirs)
    wanted, _ = model.get_rope_index(
        theirs,
        torch.tensor([tokens]),
        (torch.tensor([tokens]) == 9).int(),
        torch.tensor([[1, *grid] for grid in grids]),
    )
    ours = grid_positions(len(tokens), [(2, 2, 3), (9, 1, 1), (13, 4, 1)])
    assert ours.tolist() == wanted[:, 0].tolist()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    upright = noise_image(90, 60)
    turns = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the inverse of the viewer's rotation
    method = turns[orientation]
    stored = upright if method is None else upright.transpose(Image.Transpose(method))
    for kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        exif = Image.Exif()
        exif[0x0112] = orientation
        options = {"quality": 95} if kind == "JPEG" else {"lossless": True} if kind == "WEBP" else {}
        data = encoded(stored.copy(), kind, exif=exif, **options)
        assert upright_size(data) == (90, 60), kind
        for size in ((90, 60), (45, 30)):
            (ours,) = pixels_of(data, [size])
            wanted = np.asarray(upright.resize(size, Image.Resampling.BICUBIC) if size != (90, 60) else upright)
            assert np.abs(ours.astype(int) - wanted).mean() < (6 if kind == "JPEG" else 0.6), kind


def test_the_size_is_read_from_the_first_bytes() -> None:
    for kind in ("JPEG", "PNG", "GIF", "BMP", "TIFF"):
        assert upright_size(encoded(noise_image(640, 480), kind)[:4096]) == (640, 480), kind


def test_all_pixel_modes_become_rgb() -> None:
    def first(image: Image.Image, kind: str = "PNG", **options: Any) -> list[int]:
        (pixels,) = pixels_of(encoded(image, kind, **options), [(4, 4)])
        assert pixels.shape == (4, 4, 3)
        assert pixels.dtype == np.uint8
        return pixels[0, 0].tolist()

    grey16 = Image.fromarray(np.full((4, 4), 0x80FF, dtype=np.uint16))
    clear = Image.new("RGBA", (4, 4), (200, 100, 50, 0))
    palette = Image.new("RGB", (4, 4), (200, 100, 50)).quantize(4)
    assert first(Image.new("RGB", (4, 4), (200, 100, 50))) == [200, 100, 50]
    assert first(Image.new("L", (4, 4), 77)) == [77, 77, 77]
    assert first(Image.new("1", (4, 4), 1)) == [255, 255, 255]
    assert first(palette) == [200, 100, 50]
    assert first(palette, transparency=0) == [255, 255, 255]
    assert first(clear) == [255, 255, 255]
    assert first(Image.new("RGBA", (4, 4), (0, 0, 0, 128))) == [127, 127, 127]
    assert first(Image.new("LA", (4, 4), (0, 0))) == [255, 255, 255]
    assert first(Image.new("RGB", (4, 4), (9, 9, 9)), transparency=(9, 9, 9)) == [255, 255, 255]
    assert first(grey16) == [0x80, 0x80, 0x80]
    cyan = np.array(first(Image.new("CMYK", (4, 4), (255, 0, 0, 0)), "JPEG", quality=95))
    assert np.abs(cyan - [0, 255, 255]).max() <= 4


def test_a_reduced_decode_of_a_large_jpeg_looks_the_same() -> None:
    image = noise_image(1600, 1200)
    data = encoded(image, "JPEG", quality=90)
    (ours,) = pixels_of(data, [(112, 84)])
    exact = np.asarray(Image.open(io.BytesIO(data)).resize((112, 84), Image.Resampling.BICUBIC))
    assert np.abs(ours.astype(int) - exact).mean() < 1.0


def test_several_sizes_are_resized_from_the_original() -> None:
    image = noise_image(64, 48)
    large, small = pixels_of(encoded(image), [(64, 48), (16, 12)])
    assert np.array_equal(large, np.asarray(image))
    assert np.array_equal(small, np.asarray(image.resize((16, 12), Image.Resampling.BICUBIC, reducing_gap=3.0)))


def broken() -> dict[str, bytes]:
    complete = {kind: encoded(noise_image(200, 150), kind) for kind in ("JPEG", "PNG", "WEBP")}
    floats = Image.fromarray(np.full((4, 4), 0.5, dtype=np.float32))
    return {
        **{f"half a {kind}": data[: len(data) // 2] for kind, data in complete.items()},
        "nothing": b"",
        "text": b"this is not an image" * 20,
        "a program": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
        "fractions": encoded(floats, "TIFF"),
    }


@pytest.mark.parametrize("name", broken())
def test_a_damaged_image_is_a_bad_image(name: str) -> None:
    with pytest.raises(BadImageError, match=r"image cannot be read|cannot be converted to RGB"):
        pixels_of(broken()[name], [(20, 20)])


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_small_file_with_too_many_pixels_is_refused_before_it_is_decoded() -> None:
    side = int(MAX_PIXELS**0.5) + 1
    tiny = encoded(Image.new("1", (8, 8)))
    head = b"IHDR" + struct.pack(">II", side, side) + tiny[24:29]
    bomb = tiny[:12] + head + struct.pack(">I", zlib.crc32(head)) + tiny[33:]
    for read in (upright_size, partial(pixels_of, sizes=[(20, 20)])):
        with pytest.raises(BadImageError, match="more than"):
            read(bomb)
