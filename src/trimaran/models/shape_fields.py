"""Changes to the fields of a shape, each checked against the type that its dataclass declares."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from trimaran.core import UserError, did_you_mean


def changed(kind: type, now: Any, changes: Any, where: str) -> Any:
    """Return a dataclass of type `kind` that equals `now` except for `changes`, whose types are checked."""
    if not isinstance(changes, Mapping):
        raise wrong_value(f"{changes!r} is not a mapping of fields", where)
    hints = get_type_hints(kind)
    refuse_unknown(changes, hints, where)
    values = {} if now is None else {name: getattr(now, name) for name in hints}
    for key, value in changes.items():
        values[key] = _typed(hints[key], values.get(key), value, f"{where}.{key}")
    for field in fields(kind):
        if field.name not in values and field.default is MISSING:
            raise wrong_value(f"{field.name} is missing", where)
    return kind(**values)


def refuse_unknown(changes: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    known = list(known)
    for key in changes:
        if key not in known:
            raise UserError("M008", f"a shape has no field '{key}'{did_you_mean(str(key), known)}", where=where,
                            fix=f"the fields here are {', '.join(known)}")  # fmt: skip


def wrong_value(what: str, where: str) -> UserError:
    return UserError("M009", what, where=where, fix=f"change or remove {where}")


def _typed(hint: Any, now: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin is tuple:
        return _sequence(args, value, where)
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
    return _plain(hint, value, where)


def _sequence(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    endless = args[-1] is Ellipsis
    if not isinstance(value, list | tuple) or not (endless or len(value) == len(args)):
        raise wrong_value(f"{value!r} is not a list" + ("" if endless else f" of {len(args)} values"), where)
    return tuple(_typed(args[0], None, each, where) for each in value)


def _plain(kind: type, value: Any, where: str) -> Any:
    if kind is float and type(value) is int and abs(value) < 1e300:
        return float(value)
    if type(value) is not kind:
        raise wrong_value(f"{value!r} is not {_KINDS[kind]}", where)
    return value


_KINDS = {
    int: "a whole number",
    float: "a number (YAML needs a dot in it: 1.0e-5)",
    bool: "true or false",
    str: "a word",
}
