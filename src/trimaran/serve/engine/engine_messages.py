"""The protocol between the server and the process of its engine: one JSON object a line over a Unix socket.

To the engine: `add` a request, `abort` one, `load` other weights, `stop`. From it: `ready` with its limits or `failed`
with the mistake, then `outputs` of steps, `refused` requests, `stats`, and `loaded` weights. An output that has a token
and nothing else, as most have, is a list of its request and its token; others are objects without fields that have
their default.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trimaran.core import UserError
from trimaran.serve.engine.engine_request import EngineRequest, TokenOutput
from trimaran.train.generation.next_token import PlacedImage
from trimaran.train.generation.sampling import Sampling

MAX_MESSAGE_BYTES = 1 << 30  # a request may have images; its body was limited before
DEFAULT_REQUEST = {"generated": (), "logprobs": None, "prompt_logprobs": False, "adapter": None, "embed": False,
                   "grammar": None}  # fmt: skip
ONLY_TOKEN = TokenOutput(request="")[2:]  # the other fields of an output that has a token only
ENCODER = json.JSONEncoder(separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What an engine can take: the tokens of a request, the requests of a step, and its pages."""

    max_length: int
    max_sequences: int
    num_pages: int
    page_size: int
    vocabulary: int


def dump_message(message: Mapping[str, Any]) -> bytes:
    """Return the message as a line. NaN and Inf stay: both ends are ours."""
    return ENCODER.encode(message).encode() + b"\n"


def request_to_json(request: EngineRequest) -> dict[str, Any]:
    """Return the request as JSON values; fields with their default are left out."""
    values: dict[str, Any] = {
        "id": request.id,
        "prompt": request.prompt,
        "sampling": asdict(request.sampling),
        "max_tokens": request.max_tokens,
        "stop_ids": sorted(request.stop_ids),
    }
    if request.images:
        values["images"] = [_image_to_json(each) for each in request.images]
    given = {name: getattr(request, name) for name in DEFAULT_REQUEST}
    return values | {name: value for name, value in given.items() if value != DEFAULT_REQUEST[name]}


def request_from_json(values: Mapping[str, Any]) -> EngineRequest:
    plain = {name: values[name] for name in DEFAULT_REQUEST if name in values and name != "generated"}
    return EngineRequest(
        id=values["id"],
        prompt=tuple(values["prompt"]),
        sampling=Sampling(**values["sampling"]),
        max_tokens=values["max_tokens"],
        stop_ids=frozenset(values["stop_ids"]),
        generated=tuple(values.get("generated", ())),
        images=tuple(_image_from_json(each) for each in values.get("images", ())),
        **plain,
    )


def output_to_json(output: TokenOutput) -> list[Any] | dict[str, Any]:
    if output.token is not None and output[2:] == ONLY_TOKEN:
        return [output.request, output.token]
    defaults = TokenOutput._field_defaults
    changed = {name: getattr(output, name) for name, value in defaults.items() if getattr(output, name) != value}
    return {"request": output.request} | changed


def output_from_json(values: list[Any] | Mapping[str, Any]) -> TokenOutput:
    if isinstance(values, list):
        return TokenOutput(*values)
    found: dict[str, Any] = dict(values)
    for name in ("top", "embedding", "prompt_logprobs"):
        if name in found:
            found[name] = _as_tuple(found[name])
    if "prompt_top" in found:
        found["prompt_top"] = tuple(_as_tuple(each) for each in found["prompt_top"])
    return TokenOutput(**found)


def error_from_json(values: Mapping[str, str]) -> UserError:
    return UserError(values["code"], values["what"], where=values["where"], fix=values["fix"])


def _as_tuple(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(each) if isinstance(each, list) else each for each in values)


def _image_to_json(image: PlacedImage) -> dict[str, Any]:
    patches = np.ascontiguousarray(image.patches)
    return {
        "patches": base64.b64encode(patches.tobytes()).decode(),
        "shape": patches.shape,
        "grids": image.grids.tolist(),
        "first": int(image.first),
        "merge": image.merge,
    }


def _image_from_json(values: Mapping[str, Any]) -> PlacedImage:
    patches = np.frombuffer(base64.b64decode(values["patches"]), dtype=np.uint8).reshape(values["shape"])
    return PlacedImage(patches, np.array(values["grids"], dtype=np.int64), values["first"], values["merge"])
