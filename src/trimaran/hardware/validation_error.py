"""What is wrong with a file that a person wrote: the first of pydantic's complaints, in our words."""

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from trimaran.core import UserError, nearest


def first_mistake(error: ValidationError, model: type[BaseModel], *, code: str, where: str) -> UserError:
    """Return the error to raise for the first field of `model` that is wrong."""
    first: Any = error.errors(include_url=False)[0]
    path, name = ".".join(map(str, first["loc"])), str(first["loc"][-1])
    if first["type"] == "extra_forbidden":
        known = _fields(model, first["loc"][:-1])
        return UserError(code, f"there is no field '{path}'{nearest(name, known)}", where=where,
                         fix=f"the fields here are {', '.join(known)}")  # fmt: skip
    return UserError(code, f"{path}: {first['msg']}", where=where, fix=f"correct {path} in that file")


def _fields(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """Return the fields of the section that `path` leads to, through lists and options."""
    for step in path:
        if step in model.model_fields:
            model = next(_models(model.model_fields[str(step)].annotation), model)
    return list(model.model_fields)


def _models(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from _models(each)
