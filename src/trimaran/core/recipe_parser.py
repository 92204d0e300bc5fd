"""Parses a recipe; every mistake becomes one UserError that names the line."""

from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from trimaran.core.errors import UserError, did_you_mean
from trimaran.core.parse_text import TextError, compose_yaml, load_yaml
from trimaran.core.recipe import Recipe

MAX_RECIPE_BYTES = 1 << 20
MAX_SHOWN = 80  # characters of a wrong value in an error

Path = tuple[str | int, ...]


def parse_recipe(text: str, *, name: str, overrides: Iterable[str] = ()) -> Recipe:
    """Return the recipe that `text` and the `--set` pairs describe. Errors call the text `name`."""
    if len(text) > MAX_RECIPE_BYTES:
        raise UserError("R002", f"the recipe is too large: {len(text):,} characters", where=name,
                        fix="name a file of at most 1 MiB; data belongs under data.path")  # fmt: skip
    tree, lines = _load_yaml(text, name)
    for pair in overrides:
        _override(tree, pair)
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise _first_error(error, name, lines, tree) from None


def dump_recipe(recipe: Recipe) -> str:
    """Return `recipe` as YAML with every default written out; the plan has only the pinned fields."""
    tree = recipe.model_dump(mode="json", exclude={"plan"})
    tree["plan"] = "auto" if recipe.plan == "auto" else recipe.plan.model_dump(mode="json", exclude_unset=True)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _load_yaml(text: str, name: str) -> tuple[dict[str, Any], dict[Path, int]]:
    lines: dict[Path, int] = {}
    try:
        root = compose_yaml(text)
        if root is not None:
            _walk(root, (), lines, name)
        tree = load_yaml(text)
    except TextError as error:
        where = f"{name}, line {error.line}" if error.line else name
        if error.is_refused:
            raise UserError("R003", error.what, where=where, fix="write the values out") from None
        raise UserError("R001", f"this is not YAML: {error.what}", where=where,
                        fix="check indents, colons and quotes; values with ': ' need quotes") from None  # fmt: skip
    if tree is None:
        return {}, lines
    if not isinstance(tree, dict):
        raise UserError("R001", "a recipe is a mapping of sections, not a single value or a list", where=name,
                        fix="start with: name: my-run")  # fmt: skip
    return tree, lines


def _walk(node: yaml.Node, path: Path, lines: dict[Path, int], name: str) -> None:
    """Record the line of every key; refuse duplicate keys."""
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, str(key.value))
            if here in lines:
                raise UserError("R004", f"'{key.value}' is set twice", where=f"{name}, line {key.start_mark.line + 1}",
                                fix=f"keep one; the first is on line {lines[here]}")  # fmt: skip
            lines[here] = key.start_mark.line + 1
            _walk(value, here, lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _walk(value, (*path, index), lines, name)


def _override(tree: dict[str, Any], pair: str) -> None:
    path, separator, raw = pair.partition("=")
    keys = path.strip().split(".")
    if not separator or not all(keys):
        raise UserError(
            "R010", f"'{_shortened(pair)}' is not a setting", where="--set", fix="write --set train.steps=200"
        )
    try:
        value = load_yaml(raw)
    except TextError as error:
        raise UserError("R010", f"the value '{_shortened(raw)}' is not YAML: {error.what}", where=f"--set {path}",
                        fix="quote the value, or write a plain number or word") from None  # fmt: skip
    here = tree
    for key in keys[:-1]:
        below = here.get(key)
        if below is None or below == "auto":
            below = {}
        if not isinstance(below, dict):
            raise UserError("R010", f"{key} is {_shortened(repr(below))}, which has no fields", where=f"--set {path}",
                            fix="set the entire section, or name a field of it")  # fmt: skip
        here[key] = here = dict(below)
    here[keys[-1]] = value


def _first_error(error: ValidationError, name: str, lines: Mapping[Path, int], tree: dict[str, Any]) -> UserError:
    """Return the error to show: the most specific one, with its line and a fix."""
    errors = error.errors(include_url=False)
    paths = [_real_path(each["loc"], tree) for each in errors]
    # An unknown key is the likeliest typo; after that the deepest error is the most specific one.
    best = max(range(len(errors)), key=lambda i: (errors[i]["type"] == "extra_forbidden", len(paths[i])))
    mistake, path = errors[best], paths[best]
    dotted = ".".join(map(str, path)) or "recipe"
    line = next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), None)
    where = f"{dotted} ({name}, line {line})" if line else f"{dotted} ({name})"
    if mistake["type"] == "extra_forbidden":
        names = _fields_at(path[:-1])
        return UserError("R011", f"there is no field '{path[-1]}'{did_you_mean(str(path[-1]), names)}", where=where,
                         fix=f"the fields here are {', '.join(names)}")  # fmt: skip
    got = mistake.get("input")
    code = "R012" if "type" in mistake["type"] or "parsing" in mistake["type"] else "R013"
    return UserError(
        code, f"{dotted} is {_shortened(repr(got))}: {_plain(mistake)}", where=where, fix=_fix(mistake, dotted)
    )


def _real_path(location: Path, tree: dict[str, Any]) -> Path:
    """Return `location` without the names of the union branches that pydantic tried."""
    path = tuple(part for part in location if part not in ("Plan", "literal['auto']"))
    while len(path) > 1 and not _reaches(tree, path):
        path = path[:-1]
    return path


def _reaches(tree: Any, path: Path) -> bool:
    """Return whether `path` leads to a value in the tree."""
    for part in path[:-1]:
        if not isinstance(tree, dict | list) or (isinstance(tree, dict) and part not in tree):
            return False
        tree = tree[part]  # type: ignore[index]
    return (isinstance(tree, dict) and path[-1] in tree) or isinstance(tree, list)


def _fields_at(path: Path) -> list[str]:
    model: Any = Recipe
    for part in path:
        annotation = model.model_fields[str(part)].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        model = next(each for each in options if isinstance(each, type) and issubclass(each, BaseModel))
    return [field for field in model.model_fields if field != "prediction"]


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text):,} characters)"


def _plain(mistake: Mapping[str, Any]) -> str:
    message = str(mistake["msg"])
    return message.removeprefix("Value error, ").removeprefix("Input ").rstrip(".")


def _fix(mistake: Mapping[str, Any], dotted: str) -> str:
    context = mistake.get("ctx", {})
    if "expected" in context:
        return f"use one of {context['expected']}"
    for bound, phrase in (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than")):
        if bound in context:
            return f"use a value of {phrase} {context[bound]}"
    if "pattern" in context:
        return "use lower-case letters, digits, dots, dashes and underscores, at most 63 of them"
    return f"give {dotted} a value of the right type; `trimaran schema` lists all fields"
