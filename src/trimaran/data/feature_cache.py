"""A disk cache of the outputs of a frozen vision tower: computed once, read from then on.

Features are stored in image order, split at image boundaries into part files. The number of tokens of each image is
known, so a part needs no table. Parts are written atomically: an interrupted run continues with the missing parts, and
several processes may write at the same time.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from trimaran.core import Recipe, UserError, open_regular_file, read_regular_text, write_atomically
from trimaran.data.quarantine import BadSampleError

PART_BYTES = 64 << 20
TOWER = "vision"
BF16 = np.dtype(np.uint16)  # numpy has no bf16; this holds its bits


class FeatureCache:
    """Image features in `folder`: image n has `tokens[n]` rows of `width` numbers. A `row_arrays.FeatureSource`."""

    def __init__(
        self, folder: Path, tokens: np.ndarray, *, width: int, dtype: np.dtype, part_bytes: int = PART_BYTES
    ) -> None:
        self.folder, self.width, self.dtype = folder, width, np.dtype(dtype)
        self._first = np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])
        # An image belongs to the part that contains its first byte.
        parts = self._first[:-1] * (width * self.dtype.itemsize) // part_bytes
        self._starts = np.flatnonzero(np.diff(parts, prepend=-1))
        self.num_parts = len(self._starts)
        self._maps: dict[int, np.ndarray] = {}

    def images(self, part: int) -> range:
        """Return the numbers of the images in a part."""
        stop = self._starts[part + 1] if part + 1 < self.num_parts else len(self._first) - 1
        return range(int(self._starts[part]), int(stop))

    def num_bytes(self, part: int) -> int:
        numbers = self.images(part)
        return int(self._first[numbers.stop] - self._first[numbers.start]) * self.width * self.dtype.itemsize

    def missing(self) -> list[int]:
        """Return the parts that do not exist or have the wrong size."""
        return [part for part in range(self.num_parts) if not self._exists(part)]

    def write(self, part: int, features: np.ndarray, bad: Mapping[int, str]) -> None:
        """Write a part: the features of its images, and the reason for each `bad` image."""
        assert features.nbytes == self.num_bytes(part)
        assert features.dtype == self.dtype
        self.folder.mkdir(parents=True, exist_ok=True)
        data = np.ascontiguousarray(features).reshape(-1).view(np.uint8).data
        write_atomically(self._file(part), data, sync=True)
        info = {"sha256": hashlib.sha256(data).hexdigest(), "bad": {str(number): why for number, why in bad.items()}}
        # The JSON file is written last: it marks the part as complete.
        write_atomically(self._file(part).with_suffix(".json"), json.dumps(info), sync=True)

    def image(self, number: int, /) -> np.ndarray:
        """Return the features of an image [tokens, width], read-only. Raises BadSampleError for a bad image."""
        if (why := self._bad.get(number)) is not None:
            raise BadSampleError(why)
        part = int(np.searchsorted(self._starts, number, side="right")) - 1
        base = self._first[self._starts[part]]
        return self._map(part)[self._first[number] - base : self._first[number + 1] - base]

    def verify(self) -> list[int]:
        """Return the parts whose checksum does not match. Reads all files."""
        return [
            part
            for part in range(self.num_parts)
            if not self._exists(part) or hashlib.sha256(self._map(part).data).hexdigest() != self._info(part)["sha256"]
        ]

    @cached_property
    def _bad(self) -> dict[int, str]:
        infos = [self._info(part)["bad"] for part in range(self.num_parts)]
        return {int(number): why for bad in infos for number, why in bad.items()}

    def _map(self, part: int) -> np.ndarray:
        if part not in self._maps:
            with open_regular_file(self._file(part), follow_links=True) as file:
                self._maps[part] = np.memmap(file, dtype=self.dtype, mode="r").reshape(-1, self.width)
        return self._maps[part]

    def _info(self, part: int) -> dict:
        return json.loads(read_regular_text(self._file(part).with_suffix(".json"), follow_links=True))

    def _exists(self, part: int) -> bool:
        file = self._file(part)
        return file.with_suffix(".json").exists() and file.exists() and file.stat().st_size == self.num_bytes(part)

    def _file(self, part: int) -> Path:
        return self.folder / f"part-{part:06d}.bin"


def refuse_trained_tower(recipe: Recipe) -> None:
    """Raise if features are cached for a tower that is trained, or for a model without a vision tower."""
    if recipe.model.kind.reads != "images":
        raise UserError("T062.family-vlm", where="data.samples.cache_features", family=recipe.model.family)
    adapter = recipe.model.adapter
    is_only_base = adapter is not None and TOWER not in adapter.towers and not adapter.train
    if TOWER not in recipe.model.freeze and not is_only_base:
        raise UserError("T062.vision-tower-trained", where="data.samples.cache_features")
