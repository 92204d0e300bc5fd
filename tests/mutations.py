"""Mutated copies of a file, for tests of readers: the same seed gives the same bytes."""

import json
import math
import random
import re
from collections.abc import Callable
from typing import Any

import yaml

Mutator = Callable[[bytes, random.Random], bytes]

# Values in place of another one, as text that is YAML and, mostly, JSON.
VALUES = (
    "[null]", "[[null], {}]", '{"a": null}', '[{"a": [null]}]',
    "null", "true", "[]", "{}", "[1, [2]]", '{"a": {"b": 1}}', '""', '"x"', "0", "-1", "-7.5", "1e308", "1e-320",
    "1e999", ".nan", "NaN", "-Infinity", ".inf", "2001-13-45", "2001-12-14", "9" * 5000, "0x" + "f" * 5000, "9" * 400,
    "9223372036854775808", "-9223372036854775809", "18446744073709551616", "10:13", "~", "!!int abc", "!!bool abc",
    "!!float x", "!!timestamp abc", "!!binary '%%%'", "!!set {a, b}", "!!omap [a]", "!!python/object:os.system {}",
    "!unknown x", "*alias", "&anchor x", '"\\u0000"', '"\\ud800"', '"\\u001b[31m"', '"\\u202e"', "'a\tb'",
    '"' + "long " * 4000 + '"', "/" + "a" * 300, "../../../etc/passwd", "-rf", "0b2", "1_000", "1.5", "🙂",
)  # fmt: skip
PYTHON_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**64, 10**400, -(10**30), 0.5, -0.5, 1e-320, 1e308, math.nan,
    math.inf, -math.inf, "", "x", "auto", "1", "nan", "\x00", "\ud800", "\x1b]0;x\x07", "a" * 5000, "/" * 5000, [],
    [[]], [None], [[None]], {"a": None}, [{"a": [None]}], {}, {"": None},
    {"a": {"b": [1]}}, [1, "2", None], [0] * 100, "../..", "/dev/null", "/", ".", "🙂",
)  # fmt: skip
ENCODINGS = ("utf-16", "utf-16-be", "utf-32", "utf-8-sig", "latin-1", "cp037")
NEST_DEPTHS = (25, 990, 100_000)


def mutate(original: bytes, seed: str) -> tuple[str, bytes]:
    """Return the name of a mutation and the mutated bytes."""
    chance = random.Random(seed)
    names = list(MUTATORS)
    name = chance.choices(names, [MUTATORS[each][1] for each in names])[0]
    return name, MUTATORS[name][0](original, chance)


def _flip(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data or b"x")
    for _ in range(chance.choice((1, 1, 2, 8))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _truncate(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _empty(data: bytes, chance: random.Random) -> bytes:
    return chance.choice((b"", b"\n", b" ", b"\x00", b"null", b"{}", b"[]", b"---\n...\n", b"{", b'"'))


def _garbage(data: bytes, chance: random.Random) -> bytes:
    return chance.randbytes(chance.choice((1, 16, 4096)))


def _lines(data: bytes, chance: random.Random) -> bytes:
    """Delete, repeat, swap or join lines."""
    lines = data.splitlines(keepends=True) or [b"\n"]
    at, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    match chance.randrange(4):
        case 0:
            del lines[at]
        case 1:
            lines.insert(other, lines[at])
        case 2:
            lines[at], lines[other] = lines[other], lines[at]
        case _:
            lines[at] = lines[at].rstrip(b"\n")
    return b"".join(lines)


def _swap_text(data: bytes, chance: random.Random) -> bytes:
    """Replace one value of YAML or JSON text by another value, without parsing the rest."""
    places = [*re.finditer(rb'(?<=[:\[,] )[^\s,{}\[\]][^\n,{}\[\]]*|(?<=[:\[,])(?:"[^"\n]*"|[-0-9.]+)', data)]
    value = chance.choice(VALUES).encode()
    if not places:
        return data + value
    found = chance.choice(places)
    return data[: found.start()] + value + data[found.end() :]


def _swap_value(data: bytes, chance: random.Random) -> bytes:
    """Replace one value of a JSON document, of one of its JSON lines, or of a YAML document; or drop or add a key."""
    lines = data.splitlines()
    try:
        if len(lines) > 1:
            at = chance.randrange(len(lines))
            tree = _changed(json.loads(lines[at]), chance)
            return b"\n".join([*lines[:at], json.dumps(tree).encode(), *lines[at + 1 :]]) + b"\n"
    except ValueError:
        pass
    try:
        return json.dumps(_changed(json.loads(data), chance)).encode() + b"\n"
    except ValueError:
        pass
    try:
        tree = _changed(yaml.safe_load(data), chance)
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).encode("utf-8", "surrogatepass")
    except (yaml.YAMLError, ValueError):
        return _flip(data, chance)


def _changed(tree: Any, chance: random.Random) -> Any:
    """Return the tree with one value, at any depth, replaced, dropped or added."""
    if isinstance(tree, dict) and tree and chance.random() < 0.9:
        key = chance.choice(list(tree))
        match chance.randrange(12):
            case 0:
                return {name: value for name, value in tree.items() if name != key}
            case 1:
                return tree | {chance.choice(("extra", "", "\x1b", 7, "step")): chance.choice(PYTHON_VALUES)}
            case _:
                return tree | {key: _changed(tree[key], chance)}
    if isinstance(tree, list) and tree and chance.random() < 0.9:
        at = chance.randrange(len(tree))
        return [*tree[:at], _changed(tree[at], chance), *tree[at + 1 :]]
    return chance.choice(PYTHON_VALUES)


def _nest(data: bytes, chance: random.Random) -> bytes:
    depth, left, right = chance.choice(NEST_DEPTHS), *chance.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"- ", b"")))
    nested = left * depth + b"1" + right * depth
    return chance.choice((nested, data + nested, b"a: " + nested, data + b"x: " + nested, nested + b"\n" + data))


def _recode(data: bytes, chance: random.Random) -> bytes:
    return data.decode("utf-8", "replace").encode(chance.choice(ENCODINGS), "replace")


def _control(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    extra = (
        b"\x00",
        b"\x1b[2J",
        b"\r",
        b"\t",
        b"\xff\xfe",
        b"\xc2\x85",
        b"\xe2\x80\xa8",
        b"\xed\xa0\x80",
        b"\x7f",
        b"%",
    )
    return data[:at] + chance.choice(extra) + data[at:]


def _long_line(data: bytes, chance: random.Random) -> bytes:
    return data + b"x" * chance.choice((70_000, 1 << 20, 10_000_000)) + chance.choice((b"", b"\n", b": 1\n"))


MUTATORS: dict[str, tuple[Mutator, int]] = {
    "flip": (_flip, 6),
    "truncate": (_truncate, 4),
    "empty": (_empty, 2),
    "garbage": (_garbage, 2),
    "lines": (_lines, 6),
    "swap text": (_swap_text, 10),
    "swap value": (_swap_value, 14),
    "nest": (_nest, 2),
    "recode": (_recode, 2),
    "control": (_control, 3),
    "long line": (_long_line, 1),
}
