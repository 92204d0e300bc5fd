"""What clients send: the fields of a request with their limits, and the prompt that they become."""

import base64
import binascii
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trimaran.core import UserError, did_you_mean
from trimaran.data import BadImageError, BadSampleError, Role, Turn
from trimaran.serve.conversation import PromptBuilder, PromptImage, decode_image, place_images
from trimaran.serve.engine.engine_request import EngineLimits
from trimaran.serve.trained_model import ModelTexts
from trimaran.train import PlacedImage

MAX_CHOICES = 128
MAX_PROMPTS = 2048
MAX_PROMPT_IDS = 1 << 22
MAX_MESSAGES = 1 << 14
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_SEED = 2**63 - 1
MAX_TOP_LOGPROBS = 20
# How many of these marks a body may have outside its texts, and what they stand for: parsing many small values takes
# seconds, during which nobody else is answered.
MAX_MARKS = {
    b"[{": (1 << 16, "lists and objects"),
    b'":': (1 << 18, "texts and fields"),
    b",": (MAX_PROMPT_IDS + (1 << 18), "values"),
}
CHUNK_BYTES = 1 << 20
Id = Annotated[int, Field(ge=0)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
# The body is parsed in the event loop: a list that is no list of these ends at its first wrong item.
Ids = Annotated[list[Id], Field(max_length=MAX_PROMPT_IDS, fail_fast=True)]
Texts = Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
Prompt = str | Ids | Texts | Annotated[list[Ids], Field(max_length=MAX_PROMPTS, fail_fast=True)]
MAX_SCHEMA_BYTES = 1 << 18
ANY_OBJECT = '{"type":"object"}'
DATA_URL = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?:;[\w=.+-]+)*;base64,(?P<data>[A-Za-z0-9+/=\s]*)", re.ASCII)
PART_CHARACTERS = 1 << 14  # of a long text, tokenised at a time until it is clear that it cannot fit
# Tokens by which the parts of a text may be too long, and an eighth: they have more than the text as a whole.
ROOM = 1 << 10
ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Strict(BaseModel):
    """Refuses fields that it does not know."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Lenient(BaseModel):
    """Ignores fields that it does not know."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, populate_by_name=True)


class CallFields(Strict):
    """Fields of every request, and those that have no effect here but that clients send."""

    model: str | None = None
    user: str | None = None
    store: bool | None = None
    metadata: Mapping[str, Any] | None = None
    service_tier: str | None = None


class StreamOptions(Lenient):
    include_usage: bool = False


class JsonSchema(Lenient):
    name: str = "answer"
    definition: Mapping[str, Any] = Field(alias="schema")


class ResponseFormat(Strict):
    """The form of an answer: any text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class NeutralFields(CallFields):
    """Fields of OpenAI's API that are accepted only with the value that changes nothing."""

    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None


class GenerationFields(NeutralFields):
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    ignore_eos: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionCall(GenerationFields):
    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        return _each_prompt(self.prompt)


class ImageUrl(Lenient):
    url: str


class ContentPart(Strict):
    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | None = None


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    name: str | None = None
    refusal: None = None


class ChatCall(GenerationFields):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class EmbeddingCall(CallFields):
    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        return _each_prompt(self.input)


def _each_prompt(given: Prompt) -> list[str | list[int]]:
    is_one = isinstance(given, str) or not given or isinstance(given[0], int)
    return [given] if is_one else list(given)  # pyrefly: ignore[bad-return]


Call = TypeVar("Call", bound=CallFields)


def may_have_many_values(body: bytes) -> bool:
    """Return whether a body has so many marks that `refuse_many_values` has to look which of them are in its texts."""
    return any(sum(map(body.count, marks)) > most for marks, (most, _) in MAX_MARKS.items())


def refuse_many_values(body: bytes) -> None:
    """Raise UserError U001 if a body has too many values, whatever they are."""
    characters = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), dtype=np.uint8)
    counts, in_text = np.zeros(256, dtype=np.int64), False
    for start in range(0, len(characters), CHUNK_BYTES):
        chunk = characters[start : start + CHUNK_BYTES]
        is_text = np.logical_xor.accumulate(chunk == ord('"')) ^ in_text
        counts += np.bincount(chunk[~is_text], minlength=256)
        in_text = bool(is_text[-1])
    for marks, (most, names) in MAX_MARKS.items():
        if counts[list(marks)].sum() > most:
            raise UserError("U001.wrong-body", where="the body", most=most, names=names)


def parse_call(kind: type[Call], body: bytes) -> Call:
    """Return the fields of a request. Raises UserError U001 with the field that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:  # members of a union each report a mistake; the first is shown
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place, where = first["loc"], ".".join(str(each) for each in first["loc"]) or "the body"
    fix = "leave it out"
    if first["type"] == "json_invalid":
        what, where = f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}", "the body"
        fix = "send one JSON object in UTF-8"
    elif first["type"] == "extra_forbidden":
        name = str(place[-1])
        what = f"there is no field {name!r} here{did_you_mean(name, kind.model_fields) if len(place) == 1 else ''}"
        fix = "leave it out, or correct its name; see docs/guides/serve.md for the fields"
    elif place and place[0] in NeutralFields.model_fields.keys() - CallFields.model_fields.keys():
        what = f"{place[0]} is not supported by this server"
    else:
        what = f"{where} is wrong: {first['msg'][:1].lower()}{first['msg'][1:]}"
        fix = "send a value of the right type and within its limits"
    raise UserError("U001", what, where=where, fix=fix)


def schema_of(wanted: ResponseFormat | None) -> str | None:
    """Return the text of the schema that a request asks for; None if any text will do. Raises UserError U011."""
    if wanted is None or wanted.type == "text":
        return None
    if find_spec("llguidance") is None:
        raise UserError("U011.server-cannot-guide", where="response_format")
    if wanted.type == "json_object":
        return ANY_OBJECT
    if wanted.json_schema is None:
        raise UserError("U001.schema-missing", where="response_format.json_schema")
    text = json.dumps(wanted.json_schema.definition, separators=(",", ":"))
    if len(text) > MAX_SCHEMA_BYTES:
        raise UserError(
            "U011.schema-more-bytes", where="response_format.json_schema", max_schema_bytes=MAX_SCHEMA_BYTES
        )
    from llguidance import LLMatcher  # noqa: PLC0415 - optional

    try:
        problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
    except ValueError as error:
        problem = str(error)
    if problem:
        raise UserError("U011.schema-cannot-used-correct", where="response_format.json_schema", problem=problem)
    return text


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """The tokens of a prompt, with all tokens of each image; `stop_ids` end its answer."""

    ids: tuple[int, ...]
    stop_ids: frozenset[int]
    images: tuple[PlacedImage, ...] = ()


def longest_prompt(limits: EngineLimits) -> int:
    """Return how many tokens a prompt may have: the model's positions, if the cache has pages for so many."""
    return min(limits.max_length, limits.num_pages * limits.page_size)


class PromptReader:
    """Makes prompts for one model. Not safe for several threads: tokenizers have state."""

    def __init__(self, texts: ModelTexts) -> None:
        self._texts, self._builder = texts, PromptBuilder(texts)

    def refuse_much_too_long(self, texts: Sequence[str], limits: EngineLimits, *, where: str) -> None:
        """Raise UserError if the texts of a prompt are far too long, having tokenised little more than fits of them."""
        size, longest = sum(map(len, texts)), longest_prompt(limits)
        if size <= max(PART_CHARACTERS, longest):
            return
        num_tokens = 0
        for text in texts:
            for start in range(0, len(text), PART_CHARACTERS):
                num_tokens += len(self._texts.tokenizer.encode(text[start : start + PART_CHARACTERS]))
                if num_tokens > longest + longest // 8 + ROOM:
                    raise UserError("U003.prompt-characters-most", where=where, size=size, longest=longest)

    def read_text(self, prompt: str | Sequence[int], *, vocabulary: int, where: str) -> PreparedPrompt:
        if isinstance(prompt, str):
            ids = self._builder.text_ids(prompt, 0).tolist()
        else:
            ids = list(prompt)
            if not ids:
                raise UserError("U001.prompt-no-tokens", where=where)
            if max(ids) >= vocabulary:
                raise UserError("U001.model-no-token", where=where, most=max(ids), vocabulary=vocabulary)
        return PreparedPrompt(tuple(ids), self._texts.stop_ids)

    def read_chat(self, messages: Sequence[ChatMessage]) -> PreparedPrompt:
        images: list[PromptImage] = []
        turns = []
        for number, message in enumerate(messages):
            parts: list[str | None] = [message.content] if isinstance(message.content, str) else []
            for place, part in enumerate(() if isinstance(message.content, str) else message.content):
                is_text = part.type == "text"
                parts.append(part.text or "" if is_text else None)
                if not is_text:
                    images.append(self._image(part, f"messages.{number}.content.{place}"))
            turns.append(Turn(ROLES[message.role], tuple(parts)))
        try:
            ids = self._builder.chat.prompt(turns)
        except BadSampleError as error:
            raise UserError("U001.conversation-cannot-written", where="messages", error=error) from None
        placed_ids, placed = place_images(ids, images, self._texts.rules)
        return PreparedPrompt(tuple(placed_ids), self._builder.stop_ids, tuple(placed))

    def _image(self, part: ContentPart, where: str) -> PromptImage:
        if self._texts.rules is None:
            raise UserError("U004.model-takes", where=where)
        url = part.image_url.url if part.image_url else ""
        match = DATA_URL.fullmatch(url)
        if match is None:
            raise UserError("U004.server-fetches", where=where)
        try:
            return decode_image(base64.b64decode(match["data"], validate=False), self._texts.rules)
        except (BadImageError, binascii.Error) as error:
            raise UserError("U004.not-image", where=where, error=error) from None
