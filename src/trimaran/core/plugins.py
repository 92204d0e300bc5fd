"""Plug-ins: objects of installed distributions, found by their entry points and loaded when a name is first used.

Only distributions that are installed count: on `sys.path`, without the current folder. A recipe names a plug-in, never
a path. Nothing is imported to list them.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any

from pydantic import AfterValidator, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from trimaran.core import templated
from trimaran.core.errors import UserError, did_you_mean
from trimaran.core.traits import MODEL_FAMILIES

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
SOURCES = (
    "python-stdlib", "text", "jsonl", "shards", "datasets", "megatron", "nanogpt",
    "chat", "webdataset", "parquet", "image-folder", "shapes", "scenes",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginKind:
    """One kind of plug-in: the group of its entry points, and what its objects must have."""

    group: str
    methods: tuple[str, ...]  # its functions; empty if the object itself is called
    field: str  # where a user names it; empty if all are used
    reserved: tuple[str, ...] = ()  # names of what is built in, which no plug-in may take
    contract: int = 1  # version of the interface; objects say in `contract` for which one they were written


KINDS: dict[str, PluginKind] = {
    "objective": PluginKind(
        group="trimaran.objectives",
        methods=("open",),
        field="objective.name",
        reserved=("auto", "language", "perception"),
    ),
    "data source": PluginKind(
        group="trimaran.data_sources", methods=("documents", "fingerprint"), field="data.source", reserved=SOURCES
    ),
    "network family": PluginKind(
        group="trimaran.families", methods=("build",), field="model.family", reserved=tuple(MODEL_FAMILIES)
    ),
    "sink": PluginKind(
        group="trimaran.sinks",
        methods=("open",),
        field="telemetry.sinks",
        reserved=("prometheus", "tensorboard", "wandb", "mlflow", "ecs", "otel"),
    ),
    "doctor rule": PluginKind(group="trimaran.doctor_rules", methods=(), field=""),
    "launch target": PluginKind(
        group="trimaran.launch_targets",
        methods=("check", "render", "submit", "submit_again", "state", "stop", "commands"),
        field="--on",
        reserved=("local", "ssh", "slurm", "k8s", "ray", "sky"),
    ),
    "autopilot policy": PluginKind(
        group="trimaran.autopilot_policies", methods=("choose",), field="autopilot.policy", reserved=("built-in",)
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """One entry point of an installed distribution. `problem` says why it is left out; empty if it can be loaded."""

    kind: str
    name: str
    distribution: str
    version: str
    target: str  # module:object
    problem: str = ""

    def as_dict(self) -> dict[str, str]:
        """Return what a run records of it."""
        return {"kind": self.kind, "name": self.name, "distribution": self.distribution, "version": self.version}


def installed_plugins(kind: str) -> tuple[Plugin, ...]:
    """Return the installed plug-ins of a kind by name, also those that are left out. Nothing is imported."""
    here = os.path.realpath(os.curdir)  # `python -m` puts this folder first, and anybody may have written it
    paths = tuple(each for each in sys.path if each and os.path.realpath(each) != here)
    return tuple(each for each in _scan(paths) if each.kind == kind)


def plugin_names(kind: str) -> tuple[str, ...]:
    """Return the names of the plug-ins of a kind that can be used."""
    return tuple(each.name for each in installed_plugins(kind) if not each.problem)


def find_plugin(kind: str, name: str) -> Plugin:
    """Return the installed plug-in of this name; raise UserError if there is none, or if it is left out."""
    found = [each for each in installed_plugins(kind) if each.name == name]
    if found and all(each.problem for each in found):
        raise left_out(found[0])
    if not found:
        known = (*KINDS[kind].reserved, *plugin_names(kind))
        raise UserError(
            "K075.no-machine",
            where=KINDS[kind].field or kind,
            kind=kind,
            name=name,
            guess=did_you_mean(name, known),
            known=", ".join(known) or "none",
        )
    return next(each for each in found if not each.problem)


def load_plugin(kind: str, name: str) -> Any:
    """Return the object of the plug-in of this name; raise UserError if it is not installed or cannot be used."""
    return load(find_plugin(kind, name))


def load(plugin: Plugin) -> Any:
    """Import the plug-in and return its object, an instance if it is a class; raise UserError if it cannot be used."""
    if plugin.problem:
        raise left_out(plugin)
    loaded = _load(plugin)
    if isinstance(loaded, str):
        raise left_out(replace(plugin, problem=loaded))
    return loaded


@contextmanager
def plugin_errors(error_of: Callable[[str, str], UserError]) -> Iterator[None]:
    """Raise `error_of` the type's name and the first line of an exception of a plug-in, unless it is a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a plug-in may raise anything
        raise error_of(type(error).__name__, str(error).strip().partition("\n")[0][:200]) from error


def left_out(plugin: Plugin) -> UserError:
    """Return the error about a plug-in that cannot be used."""
    return UserError(
        "K076.left-out",
        where=f"{plugin.distribution} {plugin.version}, {plugin.target}",
        plugin=plugin.kind,
        plugin_name=plugin.name,
        problem=plugin.problem,
        distribution=plugin.distribution,
    )


@lru_cache(maxsize=256)
def _load(plugin: Plugin) -> Any:
    """Return the object, or why it cannot be used, as a text."""
    from importlib.metadata import EntryPoint  # noqa: PLC0415  takes as long to import as the rest of this package

    kind = KINDS[plugin.kind]
    importlib.invalidate_caches()  # it may have been installed after this process started
    try:
        loaded = EntryPoint(plugin.name, plugin.target, kind.group).load()
        loaded = loaded() if isinstance(loaded, type) else loaded
    except (Exception, SystemExit) as error:  # a package may raise anything
        return templated(
            "it cannot be imported: {kind}: {error}",
            kind=type(error).__name__,
            error=str(error).strip().partition(chr(10))[0][:200],
        )
    version = getattr(loaded, "contract", None)
    if version != kind.contract:
        has = (
            "has no attribute `contract`"
            if version is None
            else templated("was written for contract {version!r:.40}", version=version)
        )
        return templated(
            "it {has}, and this release supports contract {contract} of a {plugin}",
            has=has,
            contract=kind.contract,
            plugin=plugin.kind,
        )
    if missing := [name for name in kind.methods if not callable(getattr(loaded, name, None))]:
        return templated(
            "it has no {missing}, which contract {contract} asks for",
            missing=", ".join(f"{name}()" for name in missing),
            contract=kind.contract,
        )
    if not kind.methods and not callable(loaded):
        return "it cannot be called"
    return loaded


@lru_cache(maxsize=4)
def _scan(paths: tuple[str, ...]) -> tuple[Plugin, ...]:
    """Return the plug-ins of all distributions in these folders, of which the first of a name counts."""
    from importlib.metadata import distributions  # noqa: PLC0415

    kinds = {kind.group: name for name, kind in KINDS.items()}
    found: list[Plugin] = []
    seen: set[str] = set()
    for each in distributions(path=[*paths]):
        # Of most distributions this reads one small file, or none.
        name = str(each.metadata["Name"] or "") if "trimaran." in (each.read_text("entry_points.txt") or "") else ""
        normalised = re.sub(r"[-_.]+", "-", name).lower()
        if not name or normalised in seen:
            continue
        seen.add(normalised)
        found += [
            Plugin(kind=kinds[point.group], name=point.name, distribution=name, version=each.version,
                   target=point.value)
            for point in each.entry_points
            if point.group in kinds
        ]  # fmt: skip
    owners: dict[tuple[str, str], list[str]] = {}
    for each in found:
        owners.setdefault((each.kind, each.name), []).append(each.distribution)
    checked = []
    for each in found:
        problem, rivals = "", owners[each.kind, each.name]
        if not NAME.fullmatch(each.name):
            problem = "its name is not lower-case letters, digits, dots, dashes and underscores"
        elif each.name in KINDS[each.kind].reserved:
            problem = templated("there is a {each} of this name in Trimaran itself", each=each.kind)
        elif len(rivals) > 1:
            problem = templated("several packages have one of this name: {rivals}", rivals=", ".join(sorted(rivals)))
        checked.append(replace(each, problem=problem))
    return tuple(sorted(checked, key=lambda each: (each.kind, each.name, each.distribution)))


UNCHECKED = {"any_plugin": True}
"""The context of a validation that accepts plug-ins which are not installed here, such as that of another's run."""


def name_check(kind: str) -> Callable[[str, ValidationInfo], str]:
    """Return the validator of a field that names a `kind`."""

    def check(name: str, info: ValidationInfo) -> str:
        if name in KINDS[kind].reserved or (info.context == UNCHECKED and NAME.fullmatch(name)):
            return name
        if name in (known := plugin_names(kind)):
            return name
        problem = next((each.problem for each in installed_plugins(kind) if each.name == name), "")
        if problem:
            raise PydanticCustomError("value_error", "the plug-in is left out: {why}", {"why": problem})
        *first, last = (repr(each) for each in (*KINDS[kind].reserved, *known))
        expected = f"{', '.join(first)} or {last}" if first else last
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})

    return check


def check_sink(name: str, info: ValidationInfo) -> str:
    """Return the name of a sink of a plug-in; those built in have fields of their own."""
    known = plugin_names("sink")
    if name in KINDS["sink"].reserved:
        raise PydanticCustomError("value_error", "this sink is built in, and has a field of its own: telemetry.{name}",
                                  {"name": name})  # fmt: skip
    if name in known or (info.context == UNCHECKED and NAME.fullmatch(name)):
        return name
    problem = next((each.problem for each in installed_plugins("sink") if each.name == name), "")
    why = f"the plug-in is left out: {problem}" if problem else "no installed plug-in has this sink"
    listed = f"; installed are {', '.join(known)}" if known else ""
    raise PydanticCustomError("value_error", "{why}", {"why": why + listed})


def _name_schema(kind: str) -> WithJsonSchema:
    names = {"enum": [*KINDS[kind].reserved]}
    return WithJsonSchema({"anyOf": [names, {"type": "string", "pattern": f"^{NAME.pattern}$"}]})


FamilyName = Annotated[str, AfterValidator(name_check("network family")), _name_schema("network family")]
SourceName = Annotated[str, AfterValidator(name_check("data source")), _name_schema("data source")]
ObjectiveName = Annotated[str, AfterValidator(name_check("objective")), _name_schema("objective")]
PolicyName = Annotated[str, AfterValidator(name_check("autopilot policy")), _name_schema("autopilot policy")]
SinkName = Annotated[str, AfterValidator(check_sink), WithJsonSchema({"type": "string"})]
