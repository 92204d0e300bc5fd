"""Turns the first of pydantic's validation errors in a user's file into a UserError."""

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from trimaran.core import UserError, did_you_mean


def first_error(error: ValidationError, model: type[BaseModel], *, code: str, where: str) -> UserError:
    """Return the error to raise for the first invalid field of `model`."""
    first: Any = error.errors(include_url=False)[0]
    path = ".".join(map(str, first["loc"]))
    if not path:  # the rule is about several fields, or about the whole section
        message = first["msg"].removeprefix("Value error, ")
        return UserError(code, message, where=where, fix="correct that in this file")
    if first["type"] == "extra_forbidden":
        name, names = str(first["loc"][-1]), _fields(model, first["loc"][:-1])
        return UserError(code, f"there is no field '{path}'{did_you_mean(name, names)}", where=where,
                         fix=f"the fields here are {', '.join(names)}")  # fmt: skip
    return UserError(code, f"{path}: {first['msg']}", where=where, fix=f"correct {path} in that file")


def _fields(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """Return the fields of the section at `path`; lists and unions are followed."""
    for step in path:
        if step in model.model_fields:
            model = next(_models(model.model_fields[str(step)].annotation), model)
    return list(model.model_fields)


def _models(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from _models(each)
