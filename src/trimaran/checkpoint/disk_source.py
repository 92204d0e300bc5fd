"""A checkpoint on disk as a `CheckpointSource`."""

from pathlib import Path

import torch
from torch import Tensor

from trimaran.checkpoint.step_files import StepFiles
from trimaran.parallel.tensor_regions import TensorRegion
from trimaran.parallel.tensor_shards import TORCH_DTYPES


class DiskSource:
    """The state in a step directory. Manifest and index are verified here; call `verify` first for the rest."""

    def __init__(self, path: Path) -> None:
        self._files = StepFiles(path)
        self.path, self.manifest, self.index = path, self._files.manifest, self._files.index
        self.step, self.progress = self.manifest.step, self.manifest.progress

    def read(self, key: str, region: TensorRegion) -> Tensor:
        """Return the values of a region, in its shape. Pages are read from the disk when they are accessed."""
        meta = self.index[key].meta
        raw = self._files.bytes_of(meta, region)
        return torch.from_numpy(raw).view(TORCH_DTYPES[meta.dtype]).view(region.size)
