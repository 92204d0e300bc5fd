"""Fields of a recipe that name something built in or a plug-in."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from trimaran.core.plugins import KINDS, NAME, installed_plugins, plugin_names

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


def _schema(kind: str) -> dict[str, Any]:
    return {"anyOf": [{"enum": [*KINDS[kind].reserved]}, {"type": "string", "pattern": f"^{NAME.pattern}$"}]}


FamilyName = Annotated[str, AfterValidator(name_check("network family")), WithJsonSchema(_schema("network family"))]
SourceName = Annotated[str, AfterValidator(name_check("data source")), WithJsonSchema(_schema("data source"))]
ObjectiveName = Annotated[str, AfterValidator(name_check("objective")), WithJsonSchema(_schema("objective"))]
PolicyName = Annotated[str, AfterValidator(name_check("autopilot policy")), WithJsonSchema(_schema("autopilot policy"))]
SinkName = Annotated[str, AfterValidator(check_sink), WithJsonSchema({"type": "string"})]
