"""The file of a calibration: whether it can be written, before anything is measured, and how it is."""

import tempfile
from pathlib import Path

from trimaran.core import UserError
from trimaran.core.regular_files import write_atomically
from trimaran.machine import Calibration


def refuse_unwritable(path: Path, *, what: str = "calibration", option: str = "--output") -> None:
    """Raise if the file cannot be written: before the measurement, not after. `option` names another one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError("C009", f"the {what} cannot be written: {error.strerror}", where=str(path),
                        fix=f"name another file with {option}") from None  # fmt: skip


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write the file atomically: a planner that reads it meanwhile gets the old or the new one."""
    write_atomically(path, calibration.model_dump_json(indent=2, exclude_none=True) + "\n", mode=0o644)
