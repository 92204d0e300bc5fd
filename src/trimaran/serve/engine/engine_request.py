"""Requests and outputs of the engine, and their JSON form between the server and the process of its engine."""

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from trimaran.core import UserError
from trimaran.train import PlacedImage, Sampling

EngineFinish = Literal["stop", "length", "context", "error"]
TopTokens = tuple[tuple[int, float], ...]
MAX_MESSAGE_BYTES = 1 << 30  # a request may have images; its body was limited before
DEFAULT_REQUEST = {"generated": (), "logprobs": None, "prompt_logprobs": False, "adapter": None, "embed": False,
                   "grammar": None}  # fmt: skip
ENCODER = json.JSONEncoder(separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One text to continue, or with `embed` to embed."""

    id: str
    prompt: tuple[int, ...]  # with all tokens of each of its `images`
    sampling: Sampling
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    # Tokens of an earlier engine: they follow the prompt, count as new ones, and as many draws of the seed are skipped.
    generated: tuple[int, ...] = ()
    logprobs: int | None = None  # k: log-probabilities of each new token, and of the k likeliest ones
    prompt_logprobs: bool = False  # also those of the prompt
    adapter: str | None = None  # the name of a loaded one
    images: tuple[PlacedImage, ...] = ()
    # Generates nothing: the answer is the mean of the last layer's outputs over the prompt, with norm 1.
    embed: bool = False
    grammar: str | None = None  # the text of a JSON schema that the answer must match


class TokenOutput(NamedTuple):
    """One step's result for one request. `finish` says why it ended; None if more follows.

    `stop`: `token` is one of the stop ids, and not part of the text; `length`: after `max_tokens`; `context`: the next
    token would not fit in the model's positions or in the cache; `error`: see `error`. `top` are the likeliest tokens.
    With `prompt_logprobs` the request's first output has one entry for each token of the prompt; the first is None,
    because nothing comes before it.
    """

    request: str
    token: int | None = None
    logprob: float | None = None
    top: TopTokens = ()
    finish: EngineFinish | None = None
    error: str = ""
    embedding: tuple[float, ...] | None = None
    prompt_logprobs: tuple[float | None, ...] = ()
    prompt_top: tuple[TopTokens, ...] = ()


class TokenConstraint(Protocol):
    """Limits the next token of a request, for guided output. `advance` is called with each token, in order."""

    def allowed(self) -> np.ndarray:
        """Return a mask, bool [vocabulary], of the next tokens that are allowed. At least one is."""
        ...

    def advance(self, token: int) -> None:
        """Take note of a token that was generated."""
        ...


ONLY_TOKEN = TokenOutput(request="")[2:]  # the other fields of an output that has a token only


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
        values["images"] = [
            {"patches": base64.b64encode(np.ascontiguousarray(each.patches).tobytes()).decode(),
             "shape": each.patches.shape, "grids": each.grids.tolist(), "first": int(each.first), "merge": each.merge}
            for each in request.images
        ]  # fmt: skip
    given = {name: getattr(request, name) for name in DEFAULT_REQUEST}
    return values | {name: value for name, value in given.items() if value != DEFAULT_REQUEST[name]}


def request_from_json(values: Mapping[str, Any]) -> EngineRequest:
    plain = {name: values[name] for name in DEFAULT_REQUEST if name in values and name != "generated"}
    images = []
    for each in values.get("images", ()):
        patches = np.frombuffer(base64.b64decode(each["patches"]), dtype=np.uint8).reshape(each["shape"])
        images.append(PlacedImage(patches, np.array(each["grids"], dtype=np.int64), each["first"], each["merge"]))
    return EngineRequest(
        id=values["id"],
        prompt=tuple(values["prompt"]),
        sampling=Sampling(**values["sampling"]),
        max_tokens=values["max_tokens"],
        stop_ids=frozenset(values["stop_ids"]),
        generated=tuple(values.get("generated", ())),
        images=tuple(images),
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
            found[name] = tuple(tuple(each) if isinstance(each, list) else each for each in found[name])
    if "prompt_top" in found:
        found["prompt_top"] = tuple(tuple(tuple(each) for each in top) for top in found["prompt_top"])
    return TokenOutput(**found)


def error_from_json(values: Mapping[str, str]) -> UserError:
    return UserError(values["code"], values["what"], where=values["where"], fix=values["fix"])
