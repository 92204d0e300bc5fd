"""Imports of modules that need an optional package."""

import importlib
import importlib.util
from types import ModuleType

from trimaran.core import UserError


def require(package: str, *, where: str, extra: str = "hf") -> None:
    """Raise unless `package` is installed; does not import it. `where` needs it, and `extra` of ours brings it."""
    if importlib.util.find_spec(package) is None:
        raise UserError("T013.needs-package", where=where, package=package, extra=extra)


def load(module: str, package: str, *, where: str) -> ModuleType:
    """Return `trimaran.data.<module>`, the only module that imports `package`."""
    require(package, where=where)
    return importlib.import_module(f"trimaran.data.{module}")
