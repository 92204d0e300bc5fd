"""A checkpoint on disk as a source to load from."""

from pathlib import Path

import torch
from torch import Tensor

from trimaran.checkpoint.rank_share import TORCH_DTYPES
from trimaran.checkpoint.step_files import StepFiles
from trimaran.checkpoint.tensor_regions import TensorRegion
from trimaran.checkpoint.verify_checkpoint import verify

__all__ = ["DiskSource", "verify"]


class DiskSource:
    """The state in a step directory. Manifest and index are checked here; let `verify` check the rest before."""

    def __init__(self, path: Path) -> None:
        self._files = StepFiles(path)
        self.path, self.manifest, self.index = path, self._files.manifest, self._files.index
        self.step, self.progress = self.manifest.step, self.manifest.progress

    def read(self, key: str, part: TensorRegion) -> Tensor:
        """Return the values of a part, in its shape. Only what is looked at is read from the disk."""
        whole = self.index[key].whole
        raw = self._files.bytes_of(whole, part)
        return torch.from_numpy(raw).view(TORCH_DTYPES[whole.dtype]).view(part.size)
