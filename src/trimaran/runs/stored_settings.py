"""Reads the recipe and the plan of a run directory.

`RunDirectory` imports it when they are read: a process that only needs paths, such as the sidecar, starts without
pydantic.
"""

from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError

from trimaran.core import Plan, Prediction, Recipe, UserError, parse_recipe, show_bytes
from trimaran.core.parse_text import TextError, load_json
from trimaran.core.regular_files import read_regular_bytes

MAX_FILE_BYTES = 16 << 20


def read_stored_recipe(path: Path) -> Recipe:
    """Return the recipe in this file; raise UserError if it is missing or damaged."""
    return _parsed_recipe(_read_text(path), str(path))


def read_stored_plan(path: Path) -> Plan:
    """Return the plan in this file with its prediction; raise UserError if it is missing or damaged."""
    try:
        tree = load_json(_read_text(path))
        prediction = Prediction.model_validate(tree["prediction"]) if tree.get("prediction") else None
        return Plan.model_validate(tree["plan"]).model_copy(update={"prediction": prediction})
    except TextError as error:
        raise _unreadable(path, error.what, line=error.line) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _unreadable(path, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (KeyError, TypeError, AttributeError):
        raise _unreadable(path, "it has no plan") from None


def _read_text(path: Path) -> str:
    """Return the text of a file that the run cannot do without."""
    try:
        data = read_regular_bytes(path, limit_bytes=MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    if len(data) > MAX_FILE_BYTES:
        raise _unreadable(path, f"it is larger than {show_bytes(MAX_FILE_BYTES)}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _unreadable(path, "it is not UTF-8 text", line=data.count(b"\n", 0, error.start) + 1) from None


@lru_cache(maxsize=4)
def _parsed_recipe(text: str, name: str) -> Recipe:
    """Return the recipe of the text. A process reads that of its run several times, and parsing takes 14 ms.

    Its plug-ins need not be installed where it is read: only the ranks and the sinks load them.
    """
    return parse_recipe(text, name=name, any_plugin=True)


def _unreadable(path: Path, why: str, *, line: int = 0) -> UserError:
    return UserError("A008", f"{path.name} of this run cannot be read: {why}",
                     where=f"{path}, line {line}" if line else str(path),
                     fix="if the run is just starting, wait; otherwise restore the file, or start the run again"
                     )  # fmt: skip
