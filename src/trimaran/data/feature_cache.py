"""What a frozen tower makes of the images, kept on disk: computed once, read ever after.

The features of image 0 come first, then those of image 1, and so on, cut into part files at whole images. How
many tokens each image has is known beforehand, so a part needs no table. A part is complete or it is not there: work
that was interrupted goes on with those that are missing, and many processes may write at the same time.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from trimaran.core import Recipe, UserError
from trimaran.data.quarantine import BadSampleError

PART_BYTES = 64 << 20
TOWER = "vision"
BF16 = np.dtype(np.uint16)  # numpy has no bf16: its bits


class FeatureStore:
    """Features of images in `folder`: of image n `tokens[n]` rows of `width` numbers. See `ImageSheet`."""

    def __init__(
        self, folder: Path, tokens: np.ndarray, *, width: int, dtype: np.dtype, part_bytes: int = PART_BYTES
    ) -> None:
        self.folder, self.width, self.dtype = folder, width, np.dtype(dtype)
        self._first = np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])
        # An image belongs to the part that its first byte falls into.
        parts = self._first[:-1] * (width * self.dtype.itemsize) // part_bytes
        self._starts = np.flatnonzero(np.diff(parts, prepend=-1))
        self._maps: dict[int, np.ndarray] = {}

    @property
    def num_parts(self) -> int:
        return len(self._starts)

    def images(self, part: int) -> range:
        """Return the numbers of the images in a part."""
        stop = self._starts[part + 1] if part + 1 < self.num_parts else len(self._first) - 1
        return range(int(self._starts[part]), int(stop))

    def num_bytes(self, part: int) -> int:
        numbers = self.images(part)
        return int(self._first[numbers.stop] - self._first[numbers.start]) * self.width * self.dtype.itemsize

    def missing(self) -> list[int]:
        """Return the parts that are not there, or are not of the size that they should have."""
        return [part for part in range(self.num_parts) if not self._is_there(part)]

    def write(self, part: int, features: np.ndarray, bad: Mapping[int, str]) -> None:
        """Put a part in its place: the features of its images, and why those that are `bad` have none."""
        assert features.nbytes == self.num_bytes(part)
        assert features.dtype == self.dtype
        self.folder.mkdir(parents=True, exist_ok=True)
        data = np.ascontiguousarray(features).reshape(-1).view(np.uint8).data
        put_file(self._file(part), data)
        words = {"sha256": hashlib.sha256(data).hexdigest(), "bad": {str(number): why for number, why in bad.items()}}
        put_file(self._file(part).with_suffix(".json"), json.dumps(words).encode())  # last: with it the part is there

    def image(self, number: int, /) -> np.ndarray:
        """Return the features of an image, [tokens, width], read-only; raises when it could not be read."""
        if (why := self._bad.get(number)) is not None:
            raise BadSampleError(why)
        part = int(np.searchsorted(self._starts, number, side="right")) - 1
        base = self._first[self._starts[part]]
        return self._map(part)[self._first[number] - base : self._first[number + 1] - base]

    def verify(self) -> list[int]:
        """Return the parts that are not byte for byte what was written. Reads everything."""
        return [part for part in range(self.num_parts) if not self._is_sound(part)]

    @cached_property
    def _bad(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for part in range(self.num_parts):
            found |= {int(number): why for number, why in self._words(part)["bad"].items()}
        return found

    def _map(self, part: int) -> np.ndarray:
        if part not in self._maps:
            self._maps[part] = np.memmap(self._file(part), dtype=self.dtype, mode="r").reshape(-1, self.width)
        return self._maps[part]

    def _words(self, part: int) -> dict:
        return json.loads(self._file(part).with_suffix(".json").read_text(encoding="utf-8"))

    def _is_there(self, part: int) -> bool:
        file = self._file(part)
        return file.with_suffix(".json").exists() and file.exists() and file.stat().st_size == self.num_bytes(part)

    def _is_sound(self, part: int) -> bool:
        return self._is_there(part) and hashlib.sha256(self._map(part).data).hexdigest() == self._words(part)["sha256"]

    def _file(self, part: int) -> Path:
        return self.folder / f"part-{part:06d}.bin"


def refuse_trained(recipe: Recipe) -> None:
    """Raise when features are to be kept of a tower that changes, or that does not exist."""
    if recipe.model.family != "vlm":
        raise UserError("T062", f"only the family vlm keeps features of images, and the model is of family "
                        f"{recipe.model.family}", where="data.samples.cache_features",
                        fix="set data.samples.cache_features to false")  # fmt: skip
    if TOWER not in recipe.model.freeze:
        raise UserError("T062", "the vision tower is trained, so what it makes of an image changes with every step",
                        where="data.samples.cache_features",
                        fix="freeze it: --set 'model.freeze=[vision]', or set cache_features to false")  # fmt: skip


def put_file(path: Path, data: bytes | memoryview) -> None:
    """Write a file whole or not at all, also when two do it at the same time."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)
