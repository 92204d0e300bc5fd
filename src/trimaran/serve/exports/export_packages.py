"""Imports of the packages that some export formats need. They are extras."""

import contextlib
import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from trimaran.core import UserError


def require_package(name: str, *, where: str) -> Any:
    """Return the module `name`; raise UserError with the command that installs it if it is missing."""
    try:
        with quiet_packages():
            return importlib.import_module(name)
    except ImportError as error:
        raise UserError("K071", f"this needs the package '{name.partition('.')[0]}', which cannot be imported: {error}",
                        where=where, fix="pip install 'trimaran[export]'") from None  # fmt: skip


def cannot_hold(what: str, *, where: str, fix: str) -> UserError:
    """Return the error for a model or an option that a format has no place for."""
    return UserError("K070", what, where=where, fix=fix)


@contextlib.contextmanager
def quiet_packages() -> Iterator[None]:
    """Keep warnings of other packages about their own code off the terminal, and whatever they print off stdout.

    Standard output is for the answer of a command, which may be JSON.
    """
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
