"""Writes the weights of a loop alone, without the optimizer: one safetensors file."""

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from trimaran.core import UserError
from trimaran.parallel.comm.json_exchange import broadcast_json


def write_weights(file: str | Path, weights: Mapping[str, Tensor]) -> Path:
    """Write the weights that rank 0 holds to `file`, complete or not at all, and return its path on every rank.

    Every rank must call it; all raise, or none does.
    """
    path, failure = Path(file).absolute(), ""
    if path.suffix != ".safetensors":
        raise UserError("K084", "weights are written to a .safetensors file", where=f"save_weights({str(file)!r})",
                        fix=f"name it {path.with_suffix('.safetensors').name}")  # fmt: skip
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}-", delete=False) as draft:
                temporary = Path(draft.name)
            try:
                save_file({name: each.contiguous() for name, each in weights.items()}, temporary)
                _flush(temporary)
                temporary.chmod(0o644)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            failure = error.strerror or str(error)
    if dist.is_initialized():
        failure = broadcast_json(failure)
    if failure:
        raise UserError("K084", f"the weights cannot be written: {failure}", where=str(path),
                        fix="name a file on a disk with free space that you may write to")  # fmt: skip
    return path


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
