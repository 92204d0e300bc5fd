"""Fields of a config.json and of a recipe's shape, each checked against its type."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from trimaran.core import UserError, did_you_mean, read_regular_bytes, templated
from trimaran.models.validate_spec import MOST

Names = tuple[str, ...]

MOST_PIXELS = 2**16


@dataclass(frozen=True, slots=True)
class Fields:
    """A mapping of a configuration, and the `usual` defaults of its class. A null counts as missing."""

    config: Mapping[str, Any]
    where: str
    usual: Mapping[str, Any] = field(default_factory=dict)

    def has(self, *names: str) -> bool:
        return any(each.get(name) is not None for each in (self.config, self.usual) for name in names)

    def integer(self, *names: str, default: int | None = None) -> int:
        return self._typed(names, default, int)

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
        return self._typed(names, default, bool)

    def word(self, *names: str, default: str) -> str:
        return self._typed(names, default, str)

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

    def divided(self, hidden: int, heads: int) -> int:
        """Return the width of a head."""
        if heads < 1 or hidden % heads:
            raise bad_field("num_attention_heads", f"{heads} heads do not divide hidden_size {hidden}", self.where)
        return hidden // heads

    def _typed(self, names: Names, default: Any, kind: type) -> Any:
        name, value = self._value(names, default)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            wrong = {int: "not a whole number", bool: "neither true nor false", str: "not a string"}[kind]
            raise bad_field(name, f"{show(value)} is {wrong}", self.where)
        return value

    def _value(self, names: Names, default: Any) -> tuple[str, Any]:
        for mapping in (self.config, self.usual):
            for name in names:
                if mapping.get(name) is not None:
                    return name, mapping[name]
        if default is None:
            raise bad_field(" | ".join(names), "it is missing", self.where)
        return names[0], default


def bad_field(name: str, what: str, where: str) -> UserError:
    return UserError("M007.wrong-value", where=where, name=name, text=what)


def unknown_network(what: str, where: str, *, fix: str = "add what is missing") -> UserError:
    return UserError("M011.configuration-not-describe", where=where, text=what, way=fix)


def show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def changed(kind: type, now: Any, changes: Any, where: str) -> Any:
    """Return a dataclass of type `kind` that equals `now` except for `changes`, whose types are checked."""
    if not isinstance(changes, Mapping):
        raise wrong_value(f"{changes!r} is not a mapping of fields", where)
    hints = get_type_hints(kind)
    refuse_unknown(changes, hints, where)
    values = {} if now is None else {name: getattr(now, name) for name in hints}
    for key, value in changes.items():
        values[key] = _typed(hints[key], values.get(key), value, f"{where}.{key}")
    for each in fields(kind):
        if each.name not in values and each.default is MISSING:
            raise wrong_value(f"{each.name} is missing", where)
    return kind(**values)


def refuse_unknown(changes: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    known = list(known)
    for key in changes:
        if key not in known:
            raise UserError(
                "M008.shape-no-field", where=where, key=key, guess=did_you_mean(str(key), known), known=", ".join(known)
            )


def wrong_value(what: str, where: str) -> UserError:
    return UserError("M009", what, where=where, fix=templated("change or remove {place}", place=where))


def _typed(hint: Any, now: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin is tuple:
        endless = args[-1] is Ellipsis
        if not isinstance(value, list | tuple) or not (endless or len(value) == len(args)):
            raise wrong_value(f"{value!r} is not a list" + ("" if endless else f" of {len(args)} values"), where)
        return tuple(_typed(args[0], None, each, where) for each in value)
    if origin is Literal:
        if value not in args:
            raise wrong_value(f"{value!r} is not one of {', '.join(map(str, args))}", where)
        return value
    if origin is UnionType or args:
        if value is None and type(None) in args:
            return None
        hint = args[0]
    if is_dataclass(hint):
        return changed(hint, now, value, where)  # pyrefly: ignore[bad-argument-type]
    if hint is float and type(value) is int and abs(value) < 1e300:
        return float(value)
    if type(value) is not hint:
        raise wrong_value(f"{value!r} is not {_KINDS[hint]}", where)
    return value


_KINDS = {
    int: "a whole number",
    float: "a number (YAML needs a dot in it: 1.0e-5)",
    bool: "true or false",
    str: "a word",
}


def read_json(path: Path, *, limit_bytes: int) -> dict[str, Any]:
    """Return the mapping in the file. Raises UserError if it is missing, malformed or too large."""
    try:
        text = read_regular_bytes(path, follow_links=True, limit_bytes=limit_bytes + 1)
    except OSError as error:
        raise UserError("M004.cannot-read", where=str(path), path=path.name, reason=error.strerror) from None
    if len(text) > limit_bytes:
        raise UserError("M005.larger-mb", where=str(path), path=path.name, limit_bytes=limit_bytes / 1000000.0)
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError("M005.not-json-truncated", where=str(path), path=path.name) from None
    if not isinstance(tree, dict):
        raise UserError("M005.holds-no-fields", where=str(path), path=path.name)
    return tree
