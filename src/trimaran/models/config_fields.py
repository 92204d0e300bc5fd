"""Fields of a third-party config.json, read with type checks and under any of their alternative names."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trimaran.core import UserError
from trimaran.models.validate_spec import MOST

Names = tuple[str, ...]

MOST_PIXELS = 2**16


@dataclass(frozen=True, slots=True)
class Fields:
    """One mapping of a configuration. A null counts as missing, as in transformers.

    `usual` holds the defaults of the model's configuration class.
    """

    config: Mapping[str, Any]
    where: str
    usual: Mapping[str, Any] = field(default_factory=dict)

    def has(self, *names: str) -> bool:
        return any(self._found(name) is not None for name in names)

    def integer(self, *names: str, default: int | None = None) -> int:
        name, value = self._value(names, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise bad_field(name, f"{show(value)} is not a whole number", self.where)
        return value

    def size(self, *names: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """Return an integer field within `least` and `most`."""
        value = self.integer(*names, default=default)
        if not least <= value <= most:
            raise bad_field(self._value(names, default)[0], f"{value} is not between {least} and {most}", self.where)
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        name, value = self._value(names, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e300:
            raise bad_field(name, f"{show(value)} is not a number", self.where)
        return float(value)

    def boolean(self, *names: str, default: bool) -> bool:
        name, value = self._value(names, default)
        if not isinstance(value, bool):
            raise bad_field(name, f"{show(value)} is neither true nor false", self.where)
        return value

    def word(self, *names: str, default: str) -> str:
        name, value = self._value(names, default)
        if not isinstance(value, str):
            raise bad_field(name, f"{show(value)} is not a string", self.where)
        return value

    def numbers(self, *names: str) -> tuple[int, ...]:
        """Return a list of integers; a single number is a list of one, and a missing field an empty list."""
        name, value = self._value(names, ())
        values = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in values):
            raise bad_field(name, f"{show(value)} is not a list of whole numbers", self.where)
        return tuple(values)

    def sides(self, *names: str) -> tuple[int, int]:
        """Return the height and the width of an image or a patch, in pixels; a single number is both."""
        values = self.numbers(*names)
        if not values or not 1 <= min(values) <= max(values) <= MOST_PIXELS:
            raise bad_field(names[0], f"{list(values)} is not a size in pixels", self.where)
        return values[0], values[-1]

    def below(self, *names: str) -> "Fields":
        """Return the fields of a nested mapping."""
        name, value = self._value(names, None)
        if not isinstance(value, Mapping):
            raise bad_field(name, f"{show(value)} is not a mapping", self.where)
        return Fields(value, f"{self.where} ({name})")

    def assuming(self, usual: Mapping[str, Any]) -> "Fields":
        return replace(self, usual={**self.usual, **usual})

    def missing(self, needed: Mapping[str, Names]) -> list[str]:
        """Return the entries of `needed` that are missing, each with the names that were tried."""
        return [f"{what} ({' | '.join(names)})" for what, names in needed.items() if not self.has(*names)]

    def _found(self, name: str) -> Any:
        value = self.config.get(name)
        return self.usual.get(name) if value is None else value

    def _value(self, names: Names, default: Any) -> tuple[str, Any]:
        for mapping in (self.config, self.usual):
            for name in names:
                if mapping.get(name) is not None:
                    return name, mapping[name]
        if default is None:
            raise bad_field(" | ".join(names), "it is missing", self.where)
        return names[0], default


def bad_field(name: str, what: str, where: str) -> UserError:
    return UserError(
        "M007", f"{name}: {what}", where=where, fix=f"give {name} the value that the weights were made with"
    )


def unknown_network(what: str, where: str, *, fix: str = "add what is missing") -> UserError:
    return UserError("M011", f"the configuration does not describe the network: {what}", where=where,
                     fix=f"{fix}, or pass the live module to outline_from_module")  # fmt: skip


def show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
