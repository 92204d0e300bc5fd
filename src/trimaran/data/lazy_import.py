"""Parts that need a package which not everybody installs."""

import importlib
import importlib.util
from types import ModuleType

from trimaran.core import UserError


def require(package: str, *, where: str) -> None:
    """Raise unless `package` is installed; nothing is imported. `where` is the field that asks for it."""
    if importlib.util.find_spec(package) is None:
        raise UserError("T013", f"this needs the package '{package}', which is not installed", where=where,
                        fix="run: pip install 'trimaran[hf]'")  # fmt: skip


def load(module: str, package: str, *, where: str) -> ModuleType:
    """Return the room's file `module`, the only one that imports `package`."""
    require(package, where=where)
    return importlib.import_module(f"trimaran.data.{module}")
