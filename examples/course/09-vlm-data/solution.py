"""How large four photos may be in a row of 4,096: python examples/course/09-vlm-data/solution.py"""

from dataclasses import replace

from lesson import NATIVE

from trimaran.data.vision.image_grid import measure_images

ROW, PHOTOS, TEXT = 4096, 4, 100


def tokens(max_pixels):
    """Return the tokens of a photo of 4000 x 3000 pixels that is scaled down to `max_pixels`."""
    return int(measure_images([[4000, 3000]], replace(NATIVE, max_pixels=max_pixels)).tokens[0])


if __name__ == "__main__":
    limit = ROW // PHOTOS - TEXT
    group = 28 * 28  # pixels of a token
    for groups in (16384, 1280, limit):
        print(f"max_pixels {groups * group:,}: {tokens(groups * group):,} tokens a photo, "
              f"{ROW // (tokens(groups * group) + TEXT)} photos with their text in a row")  # fmt: skip
