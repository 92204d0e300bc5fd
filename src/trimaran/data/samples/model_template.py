"""Conversations written with the model's own chat template, and which of their characters are learnt.

A template with `{% generation %}` markers says itself what the model generates. Without them, an answer is what the
template writes after the prompt that it makes of the turns before: exactly what the model has to generate after that
prompt, up to and including the token that ends the turn. Some templates write an answer differently when more turns
follow, for example without its reasoning. Such an answer is learnt from a text of its own that ends with it.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib import metadata
from typing import Any

import jinja2
import jinja2.ext
import numpy as np
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trimaran.core import UserError
from trimaran.data.quarantine import BadSampleError
from trimaran.data.samples.raw_sample import RawSample, Turn
from trimaran.data.samples.tokenize_chat import refuse_surrogates
from trimaran.data.text.model_tokenizer import ModelTokenizer

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Noncharacters of Unicode, which no text contains: they mark what is generated, and text that looks like a token.
BEGIN_GENERATED, END_GENERATED, PLAIN_TEXT = "\ufdd2", "\ufdd3", "\ufdd0"
MARKERS = re.compile(f"[{BEGIN_GENERATED}{END_GENERATED}]")
# Some templates write the date. Training data must be the same on every day, so it is always this one.
TEMPLATE_DATE = datetime(2024, 7, 26, 12, tzinfo=UTC)
SAFE_JINJA = (3, 1, 6)
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

Message = Mapping[str, Any]
PROBE, ANSWER = "Wxprobe", "Vxanswer"
IMAGE_PART = {"type": "image"}
PROBED_ROLES = ("system", "developer", "tool")


class ChatTemplateError(Exception):
    """A template cannot render a conversation; the message says why."""


class GenerationExtension(jinja2.ext.Extension):
    """The tag `{% generation %}`: marks text that the model generates."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN_GENERATED}{caller()}{END_GENERATED}"


class ChatRenderer:
    """Renders conversations with the templates of a model, by name, and its special tokens."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str], *, where: str) -> None:
        self._sources, self._special_tokens, self._where = dict(templates), dict(special_tokens), where
        if not {"default"} & self._sources.keys() and len(self._sources) != 1:
            raise _unusable(f"none of the templates {', '.join(sorted(self._sources))} is called default", where)

    def mentions(self, text: str) -> bool:
        """Return whether a template has this text, such as a role for which it has a rule."""
        return any(text in source for source in self._sources.values())

    def has_markers(self, tools: Sequence[Any] | None) -> bool:
        """Return whether the template says with `{% generation %}` what is generated."""
        return GENERATION.search(self._sources[self._name(tools)]) is not None

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompt: bool = False) -> str:
        """Return the text of a conversation. With `prompt` it ends with the beginning of an answer."""
        return MARKERS.sub("", self._render(messages, tools, prompt))

    def render_marked(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[str, list[range]]:
        """Return the text of a conversation, and the character ranges between generation markers."""
        texts, ranges, length, started = [], [], 0, 0
        for part in re.split(f"([{BEGIN_GENERATED}{END_GENERATED}])", self._render(messages, tools, False)):
            if part == BEGIN_GENERATED:
                started = length
            elif part == END_GENERATED:
                ranges.append(range(started, length))
            else:
                texts.append(part)
                length += len(part)
        return "".join(texts), ranges

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None, prompt: bool) -> str:
        template = self._compiled[self._name(tools)]
        named = []
        for message in messages:  # with its reasoning under the names that templates read, as transformers does
            reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
            if reasoning is not None:
                message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
            named.append(dict(message))
        try:
            return template.render(
                messages=named,
                tools=tools or None,
                documents=None,
                add_generation_prompt=prompt,
                **self._special_tokens,
            )
        except Exception as error:  # a template may fail in any way
            reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
            raise ChatTemplateError(reason) from None

    def _name(self, tools: Sequence[Any] | None) -> str:
        if tools and "tool_use" in self._sources:
            return "tool_use"
        return "default" if "default" in self._sources else next(iter(self._sources))

    @cached_property
    def _compiled(self) -> dict[str, jinja2.Template]:
        if tuple(map(int, metadata.version("jinja2").split(".")[:3])) < SAFE_JINJA:
            raise UserError("T013.chat-templates-need", where="data.samples.template")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationExtension, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        names: dict[str, Any] = environment.globals  # pyrefly: ignore[bad-assignment]
        names |= {"raise_exception": _raise, "strftime_now": TEMPLATE_DATE.strftime}
        try:
            return {name: environment.from_string(source) for name, source in self._sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise _unusable(f"line {error.lineno}: {error.message}", self._where) from None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
             sort_keys: bool = False) -> str:  # fmt: skip
    """Return JSON as transformers writes it: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _unusable(what: str, where: str) -> UserError:
    return UserError("T024.model-chat-template", where=where, text=what)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The first `num_turns` turns of a conversation as text, and the ranges of its characters that are learnt."""

    text: str
    learnt: tuple[range, ...]
    num_turns: int


EncodedChat = tuple[np.ndarray, np.ndarray, int]
"""The tokens of a text, which of them are learnt, and how many images of its conversation it has."""


class ModelTemplate:
    """The chat template of a model. If it writes no images, their tokens are put into the text of a message."""

    def __init__(self, tokenizer: ModelTokenizer, image_ids: np.ndarray, image_token: int | None) -> None:
        content, where = tokenizer.content, str(tokenizer.describe()["path"])
        self._tokenizer, self._where = tokenizer, where
        self._renderer = ChatRenderer(content.templates, content.special_tokens, where=where)
        specials = sorted(tokenizer.special_texts(), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
        self._image_text = ""
        self._known_left_out: dict[tuple[str, bool], bool] = {}
        try:
            prompt = self._renderer.render([{"role": "user", "content": PROBE}], None, prompt=True)
            self._takes_strings = PROBE in prompt
        except ChatTemplateError:
            self._takes_strings = False
        self._suffix = "" if self._renderer.has_markers(None) else self._ending()
        if image_token is not None:
            self._image_text = self._find_image_text(image_ids, image_token)
        self._anchor = tokenizer.token_text(tokenizer.end_id) or ""
        self._can_split = False
        if self._anchor:  # and a text in two parts has the same tokens as in one
            whole, parts = (self._encode_parts([each])[0][0].tolist() for each in (["a<b c"], ["a<", "b c"]))
            self._can_split = whole == parts
        facts = [dict(content.templates), dict(content.special_tokens), TEMPLATE_DATE.isoformat(), self._image_text]
        self.name = f"model {hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]}"
        # Whether a template asks for today's date; it gets a fixed one.
        self.writes_date = self._renderer.mentions("strftime_now")
        # Whether the template writes something after an answer, from which the model learns to stop.
        self.ends_turns = bool(self._suffix) or self._renderer.has_markers(None)

    def tokenize(self, raws: Sequence[RawSample]) -> list[list[EncodedChat] | BadSampleError]:
        """Return the texts of each conversation as tokens, or why it is bad."""
        rendered: list[list[RenderedChat] | BadSampleError] = []
        for raw in raws:
            try:
                messages = [self._message(turn) for turn in raw.turns]
                context = {number for number, turn in enumerate(raw.turns) if not turn.learnt}
                has_system = bool(raw.system) and messages[0]["role"] != "system"
                if has_system:
                    messages.insert(0, {"role": "system", "content": self._content((raw.system,))})
                    context = {number + 1 for number in context}
                messages, tools = self._plain(messages), self._plain(list(raw.tools)) or None
                kinds = {f"messages of the role {each['role']}" for each in messages if each["role"] in PROBED_ROLES}
                kinds |= {"tool calls"} if any(each.get("tool_calls") for each in messages) else set()
                if left_out := next((kind for kind in sorted(kinds) if self._leaves_out(kind, tools)), ""):
                    raise BadSampleError(f"the chat template leaves out {left_out}")
                write = self._by_marks if self._renderer.has_markers(tools) else self._by_prefix
                texts = write(messages, tools, context)
                rendered.append([replace(chat, num_turns=chat.num_turns - has_system) for chat in texts])
            except ChatTemplateError as error:
                rendered.append(BadSampleError(f"the chat template refuses it: {error}"))
            except BadSampleError as error:
                rendered.append(error)
        chats = [chat for each in rendered if not isinstance(each, BadSampleError) for chat in each]
        encoded = iter(self._encode(chats))
        tokenized: list[list[EncodedChat] | BadSampleError] = []
        for raw, outcome in zip(raws, rendered, strict=True):
            if isinstance(outcome, BadSampleError):
                tokenized.append(outcome)
                continue
            bad, encodings = None, list[EncodedChat]()
            for chat in outcome:
                if isinstance(mask := next(encoded), BadSampleError):
                    bad = mask
                else:
                    num_images = sum(part is None for turn in raw.turns[: chat.num_turns] for part in turn.parts)
                    encodings.append((*mask, num_images))
            tokenized.append(bad or encodings)
        return tokenized

    def prompt(self, turns: Sequence[Turn]) -> np.ndarray:
        """Return the ids of a conversation that ends with the beginning of an answer."""
        try:
            text = self._renderer.render(self._plain([self._message(turn) for turn in turns]), None, prompt=True)
        except ChatTemplateError as error:
            raise BadSampleError(f"the chat template refuses it: {error}") from None
        (encoded,) = self._encode([RenderedChat(text, (), len(turns))])
        if isinstance(encoded, BadSampleError):
            raise encoded
        return encoded[0].astype(np.int64)

    def end_of_turn(self) -> frozenset[int]:
        """Return the token that the template writes after an answer; none if it writes no special token there."""
        try:
            text = self._renderer.render(self._probed_turns(), None)
        except ChatTemplateError:
            return frozenset()
        found = self._special.match(text.partition(ANSWER)[2].lstrip())
        end = self._tokenizer.special(found[0]) if found else None
        return frozenset() if end is None else frozenset([end])

    def _by_marks(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, context: set[int]
    ) -> list[RenderedChat]:
        """Return the conversation of a template with markers; those in `context` are ignored. Turn ends are learnt."""
        text, ranges = self._renderer.render_marked(messages, tools)
        if context:
            owners: list[int] = []  # of the ranges: their messages
            for number, message in enumerate(messages):
                if message["role"] == "assistant":
                    so_far = len(self._renderer.render_marked(messages[: number + 1], tools)[1])
                    owners += [number] * (so_far - len(owners))
            if len(owners) != len(ranges):
                raise BadSampleError("the chat template does not show which answer is which")
            ranges = [each for each, owner in zip(ranges, owners, strict=True) if owner not in context]
        learnt = []
        for each in ranges:
            end = self._special.match(text, each.stop)
            is_open = self._special.search(text, each.start, each.stop) is None
            learnt.append(range(each.start, end.end() if end and is_open else each.stop))
        return [RenderedChat(text, tuple(learnt), len(messages))]

    def _by_prefix(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, context: set[int]
    ) -> list[RenderedChat]:
        """Return the conversation of a template without markers, and a text for each answer that it writes otherwise.

        An answer is learnt from the full text only if that has the prompt and the answer as they are at generation.
        The answers in `context` are not learnt.
        """
        full = self._renderer.render(messages, tools)
        learnt: list[range] = []
        others: list[RenderedChat] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number in context:
                continue
            if not number:
                raise BadSampleError("it begins with an answer: there is no prompt before it")
            prompt = self._renderer.render(messages[:number], tools, prompt=True)
            is_last = number == len(messages) - 1
            text = full if is_last else self._renderer.render(messages[: number + 1], tools)
            if not text.startswith(prompt):
                raise BadSampleError("the chat template writes this answer differently from the prompt before it")
            stop = len(prompt) + self._answer_length(text[len(prompt) :])
            if full.startswith(text[:stop]):
                learnt.append(range(len(prompt), stop))
            else:
                others.append(RenderedChat(text, (range(len(prompt), stop),), number + 1))
        return ([RenderedChat(full, tuple(learnt), len(messages))] if learnt else []) + others

    def _leaves_out(self, kind: str, tools: list[Any] | None) -> bool:
        """Return whether the template leaves out messages of this kind. One that fails on the probe does not."""
        known = kind, bool(tools)  # a model may have another template for tools
        if known not in self._known_left_out:
            question, marked = self._probed_turns()[0], self._content((ANSWER,))
            name, role = ANSWER if kind == "tool calls" else PROBE, kind.rpartition(" ")[2]
            call = {"type": "function", "id": "x00000000", "function": {"name": name, "arguments": {}}}
            talk = [question, {"role": "assistant", "content": "", "tool_calls": [call]}]
            if role == "tool":
                talk.append({"role": "tool", "name": name, "tool_call_id": "x00000000", "content": marked})
            elif role in PROBED_ROLES:
                talk = [{"role": role, "content": marked}, question]
            try:
                self._known_left_out[known] = ANSWER not in self._renderer.render(talk, tools)
            except ChatTemplateError:
                self._known_left_out[known] = False
        return self._known_left_out[known]

    def _answer_length(self, answer: str) -> int:
        """Return the length of an answer with the token that ends it; what a template writes after it is not learnt."""
        if self._suffix and answer.endswith(self._suffix):
            end = self._special.search(self._suffix)
            return len(answer) - len(self._suffix) + (end.end() if end else len(self._suffix))
        ends = [each.end() for each in self._special.finditer(answer)]
        if ends and not answer[ends[-1] :].strip():  # such as a tool call, which may end with another token
            return ends[-1]
        if not self._suffix:
            return len(answer)
        raise BadSampleError("the end of an answer cannot be found in the text of the chat template")

    def _ending(self) -> str:
        """Return what the template writes after an answer. Raises UserError if it does not show where answers are."""
        turns = self._probed_turns()
        try:
            prompt = self._renderer.render(turns[:1], None, prompt=True)
            text = self._renderer.render(turns, None)
        except ChatTemplateError as error:
            raise self._cannot_tell(f"it fails: {error}") from None
        if not text.startswith(prompt):
            raise self._cannot_tell("it writes a prompt in another way than a conversation")
        if text.count(ANSWER, len(prompt)) != 1:
            raise self._cannot_tell("it writes an answer not at all, or twice")
        return text.partition(ANSWER)[2]

    def _probed_turns(self) -> list[dict[str, Any]]:
        texts = {"user": PROBE, "assistant": ANSWER}
        return [{"role": role, "content": self._content((text,))} for role, text in texts.items()]

    def _cannot_tell(self, why: str) -> UserError:
        return UserError("T024.answers-cannot-told", where=self._where, why=why)

    def _message(self, turn: Turn) -> dict[str, Any]:
        message = dict(turn.fields) if turn.fields else {}
        message.setdefault("role", turn.role)
        if message["role"] == "developer" and not self._renderer.mentions("developer"):
            message["role"] = "system"
        if turn.has_content:
            message["content"] = self._content(turn.parts)
        return message

    def _content(self, parts: Sequence[str | None]) -> Any:
        """Return the content of a message: a text, or a list of parts if there are images or the template needs it."""
        if None not in parts and self._takes_strings:
            return "".join(part or "" for part in parts)
        if self._image_text:
            return "".join(self._image_text if part is None else part for part in parts)
        return [dict(IMAGE_PART) if part is None else {"type": "text", "text": part} for part in parts if part != ""]

    def _find_image_text(self, image_ids: np.ndarray, image_token: int) -> str:
        """Return the text of an image in a message; empty if the template itself writes image parts."""
        parts = [dict(IMAGE_PART), {"type": "text", "text": PROBE}]
        try:
            text = self._renderer.render([{"role": "user", "content": parts}], None, prompt=True)
            ids = self._tokenizer.encode_chats([text])[0][0]
            if PROBE in text and np.count_nonzero(ids == image_token) == 1:
                return ""
        except ChatTemplateError:
            pass
        names = [self._tokenizer.token_text(int(each)) for each in image_ids]
        if None in names:
            raise UserError("T024.model-chat-template-writes", where=self._where)
        return PLAIN_TEXT + "".join(str(name) for name in names) + PLAIN_TEXT

    def _plain(self, value: Any) -> Any:
        """Return a message with marks in all special tokens of its texts, so that they are encoded as plain text."""
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, Mapping):
            return {key: self._plain(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._plain(each) for each in value]
        return value

    def _marked_text(self, text: str) -> str:
        if self._image_text and self._image_text in text:
            return self._image_text.strip(PLAIN_TEXT).join(
                self._marked_text(part) for part in text.split(self._image_text)
            )
        if not text.isascii():
            if any(mark in text for mark in (PLAIN_TEXT, BEGIN_GENERATED, END_GENERATED)):
                raise BadSampleError("its text contains a character that is not one (U+FDD0 to U+FDD3)")
            refuse_surrogates(text)
        return self._special.sub(lambda found: found[0][:1] + PLAIN_TEXT + found[0][1:], text)

    def _encode(self, chats: Sequence[RenderedChat]) -> list[tuple[np.ndarray, np.ndarray] | BadSampleError]:
        split = [chat.text.split(PLAIN_TEXT) for chat in chats]
        found: list[tuple[np.ndarray, np.ndarray] | BadSampleError] = []
        for chat, parts, (ids, spans) in zip(chats, split, self._encode_parts(split), strict=True):
            if len(parts) > 1 and not self._can_split:
                reason = "its text contains a special token, which this tokenizer cannot write as plain text"
                found.append(BadSampleError(reason))
                continue
            characters = np.zeros(len(chat.text) + 1, dtype=np.int64)
            for each in chat.learnt:
                characters[each.start + 1 : each.stop + 1] = 1
            before = np.cumsum(characters)
            found.append((ids, before[spans[:, 1]] > before[spans[:, 0]]))
        return found

    def _encode_parts(self, texts: Sequence[Sequence[str]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return ids and character spans of texts in parts, which have one character between them."""
        # A part follows a special token, which is dropped: some tokenizers add a space to the beginning of a text.
        parts = [self._anchor + part if number else part for each in texts for number, part in enumerate(each)]
        encoded = iter(self._tokenizer.encode_chats(parts))
        found = []
        for text in texts:
            ids, spans, offset = [], [], 0
            for number, part in enumerate(text):
                part_ids, part_spans = next(encoded)
                if number:
                    part_ids, part_spans = part_ids[1:], part_spans[1:] - len(self._anchor)
                ids.append(part_ids)
                spans.append(part_spans + offset)
                offset += len(part) + 1
            found.append((np.concatenate(ids), np.concatenate(spans)))
        return found
