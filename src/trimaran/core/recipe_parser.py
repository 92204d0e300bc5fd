"""Parses a recipe; every mistake becomes one UserError that names the line."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

import yaml
from pydantic import ValidationError

from trimaran.core.autopilot_section import section_of_mode
from trimaran.core.errors import UserError, collected, raise_together
from trimaran.core.field_aliases import field_for, section_model
from trimaran.core.parse_text import TextError, load_yaml, load_yaml_nodes
from trimaran.core.plugin_fields import UNCHECKED
from trimaran.core.recipe import Recipe

MAX_RECIPE_BYTES = 1 << 20
MAX_SHOWN = 80  # characters of a wrong value in an error

Path = tuple[str | int, ...]


def parse_recipe(text: str, *, name: str, overrides: Iterable[str] = (), any_plugin: bool = False) -> Recipe:
    """Return the recipe that `text` and the `--set` pairs describe. Errors call the text `name`.

    All mistakes are raised together, those of the text first and in the order of its lines. `any_plugin`: accept names
    of plug-ins that are not installed here.
    """
    if len(text) > MAX_RECIPE_BYTES:
        raise UserError("R002", f"the recipe is too large: {len(text):,} characters", where=name,
                        fix="name a file of at most 1 MiB; data belongs under data.path")  # fmt: skip
    mistakes: list[UserError] = []
    tree, lines = _load_yaml(text, name, mistakes)
    settings = []
    for pair in overrides:
        with collected(mistakes):
            settings.append(_override(tree, pair))
    recipe = None
    try:
        recipe = Recipe.model_validate(tree, context=UNCHECKED if any_plugin else None)
    except ValidationError as error:
        mistakes += _mistakes(error, Places(name=name, lines=lines, settings=settings), tree)
    raise_together(mistakes)
    assert recipe is not None, "a recipe that is not valid has mistakes"
    return recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the values of a recipe come from: lines of its text, and the fields of `--set`."""

    name: str
    lines: Mapping[Path, int]
    settings: Sequence[Path]

    def line_of(self, path: Path) -> int | None:
        """Return the line of the text that holds the value at `path`; None if `--set` or a default gave it."""
        if any(path[: len(setting)] == setting for setting in self.settings):
            return None
        return next((self.lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.lines), None)

    def describe(self, path: Path) -> str:
        dotted = ".".join(map(str, path)) or "recipe"
        if (line := self.line_of(path)) is not None:
            return f"{dotted} ({self.name}, line {line})"
        is_set = any(path[: len(setting)] == setting[: len(path)] for setting in self.settings)
        return f"{dotted} (--set)" if is_set else f"{dotted} ({self.name})"


def dump_recipe(recipe: Recipe) -> str:
    """Return `recipe` as YAML with every default written out; the plan has only the pinned fields."""
    tree = recipe.model_dump(mode="json", exclude={"plan"})
    tree["plan"] = "auto" if recipe.plan == "auto" else recipe.plan.model_dump(mode="json", exclude_unset=True)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _load_yaml(text: str, name: str, mistakes: list[UserError]) -> tuple[dict[str, Any], dict[Path, int]]:
    """Return the tree of the text, and the line of every key. Keys that are set twice are added to `mistakes`."""
    lines: dict[Path, int] = {}
    try:
        tree = load_yaml_nodes(text, lambda root: _walk(root, (), lines, name, mistakes))
    except TextError as error:
        where = f"{name}, {error.place}" if error.place else name
        if error.is_refused:
            raise UserError("R003", error.what, where=where, fix="write the values out") from None
        fix = error.fix or "check indents, colons and quotes; values with ': ' need quotes"
        raise UserError("R001", f"this is not YAML: {error.what}", where=where, fix=fix) from None
    if tree is None:
        return {}, lines
    if not isinstance(tree, dict):
        raise UserError("R001", "a recipe is a mapping of sections, not a single value or a list", where=name,
                        fix="start with: name: my-run")  # fmt: skip
    return tree, lines


def _walk(node: yaml.Node, path: Path, lines: dict[Path, int], name: str, mistakes: list[UserError]) -> None:
    """Record the line of every key, and a mistake for every key that its mapping has already."""
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, str(key.value))
            if here in lines:
                where = f"{name}, line {key.start_mark.line + 1}"
                mistakes.append(UserError("R004", f"'{key.value}' is set twice", where=where,
                                          fix=f"keep one; the first is on line {lines[here]}"))  # fmt: skip
                continue
            lines[here] = key.start_mark.line + 1
            _walk(value, here, lines, name, mistakes)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _walk(value, (*path, index), lines, name, mistakes)


def _override(tree: dict[str, Any], pair: str) -> Path:
    """Set the field of a `--set` pair in the tree, and return its path."""
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
        if here is tree and key == "autopilot":
            below = section_of_mode(below)
        if not isinstance(below, dict):
            raise UserError("R010", f"{key} is {_shortened(repr(below))}, which has no fields", where=f"--set {path}",
                            fix="set the entire section, or name a field of it")  # fmt: skip
        here[key] = here = dict(below)
    here[keys[-1]] = value
    return tuple(keys)


def _mistakes(error: ValidationError, places: Places, tree: dict[str, Any]) -> list[UserError]:
    """Return one mistake for each wrong field, in the order of the text's lines; fields of `--set` come last.

    pydantic reports every form that a value may have. Of the reports about a value and its parts only those about the
    innermost parts count; several about one value are one mistake.
    """
    errors = error.errors(include_url=False)
    paths = [_real_path(each["loc"], tree) for each in errors]
    found: dict[Path, list[Any]] = {}
    for report, path in zip(errors, paths, strict=True):
        if not any(len(other) > len(path) and other[: len(path)] == path for other in paths):
            found.setdefault(path, []).append(report)
    ordered = sorted(found, key=lambda path: places.line_of(path) or MAX_RECIPE_BYTES)
    return [_mistake(found[path], path, places) for path in ordered]


def _mistake(reports: Sequence[Any], path: Path, places: Places) -> UserError:
    dotted, first = ".".join(map(str, path)) or "recipe", reports[0]
    if any(each["type"] == "extra_forbidden" for each in reports):
        return _unknown_field(path, places)
    code = "R012" if "type" in first["type"] or "parsing" in first["type"] else "R013"
    forms = ", or ".join(dict.fromkeys(map(_plain, reports)))
    what = f"{dotted} is {_shortened(repr(first.get('input')))}: {forms}"
    fix = _fix(first, dotted) if len(reports) == 1 else f"give {dotted} a value of one of these forms"
    return UserError(code, what, where=places.describe(path), fix=fix)


def _unknown_field(path: Path, places: Places) -> UserError:
    section = ".".join(str(part) for part in path[:-1] if isinstance(part, str))
    names, meant = _fields_at(path[:-1]), field_for(str(path[-1]), section)
    inside = meant.rpartition(".")[0] == section
    near = f" (did you mean '{meant.rpartition('.')[2] if inside else meant}'?)" if meant else ""
    listed = f"the fields here are {', '.join(names)}"
    fix = listed if inside or not meant else f"set {meant} instead; {listed}"
    return UserError("R011", f"there is no field '{path[-1]}'{near}", where=places.describe(path), fix=fix)


def _real_path(location: Path, tree: dict[str, Any]) -> Path:
    """Return `location` without the names of the union branches that pydantic tried, and without missing fields."""
    path: list[str | int] = []
    here: Any = tree
    for part in location:
        in_list = isinstance(here, list) and isinstance(part, int) and part < len(here)
        if in_list or (isinstance(here, dict) and part in here):
            here = here[part]
            path.append(part)
    return tuple(path) or location[:1]


def _fields_at(path: Path) -> list[str]:
    """Return the fields of the section at `path`; numbers in it are places in a list, and keys of a mapping names."""
    model, is_key = Recipe, False
    for part in path:
        if isinstance(part, int) or is_key:
            is_key = False
            continue
        annotation: Any = model.model_fields[part].annotation
        is_key = get_origin(annotation) is dict
        inner = [annotation, *(each for member in get_args(annotation) for each in (member, *get_args(member)))]
        model = next(each for each in map(section_model, inner) if each)
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
    if mistake["type"] == "value_error":  # the message says what is wrong with it
        return f"change {dotted}; `trimaran schema` lists all fields"
    return f"give {dotted} a value of the right type; `trimaran schema` lists all fields"
