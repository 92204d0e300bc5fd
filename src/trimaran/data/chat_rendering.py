"""Renders conversations with a model's own chat templates: Jinja in a sandbox, with the names that transformers has."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from importlib import metadata
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trimaran.core import UserError

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Noncharacters of Unicode, which no text contains: they mark what is generated, and text that looks like a token.
BEGIN_GENERATED, END_GENERATED, PLAIN_TEXT = "\ufdd2", "\ufdd3", "\ufdd0"
MARKERS = re.compile(f"[{BEGIN_GENERATED}{END_GENERATED}]")
# Some templates write the date. Training data must be the same on every day, so it is always this one.
TEMPLATE_DATE = datetime(2024, 7, 26, 12, tzinfo=UTC)
SAFE_JINJA = (3, 1, 6)
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

Message = Mapping[str, Any]


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

    @property
    def facts(self) -> list[Any]:
        """What the rendered text depends on, for a fingerprint."""
        return [self._sources, self._special_tokens, TEMPLATE_DATE.isoformat()]

    @property
    def writes_date(self) -> bool:
        """Whether a template asks for today's date; it gets a fixed one."""
        return any("strftime_now" in source for source in self._sources.values())

    def mentions(self, role: str) -> bool:
        """Return whether a template has a rule for messages of this role."""
        return any(role in source for source in self._sources.values())

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
        try:
            return template.render(
                messages=[_with_reasoning(message) for message in messages],
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
        environment = _environment()
        try:
            return {name: environment.from_string(source) for name, source in self._sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise _unusable(f"line {error.lineno}: {error.message}", self._where) from None


def _environment() -> ImmutableSandboxedEnvironment:
    if tuple(map(int, metadata.version("jinja2").split(".")[:3])) < SAFE_JINJA:
        raise UserError("T013", "chat templates need jinja2 3.1.6 or later: the sandbox of earlier versions has holes",
                        where="data.samples.template", fix="run: pip install -U jinja2")  # fmt: skip
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationExtension, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    names: dict[str, Any] = environment.globals  # pyrefly: ignore[bad-assignment]
    names |= {"raise_exception": _raise, "strftime_now": TEMPLATE_DATE.strftime}
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
             sort_keys: bool = False) -> str:  # fmt: skip
    """Return JSON as transformers writes it: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _with_reasoning(message: Message) -> dict[str, Any]:
    """Return the message with its reasoning under the names that templates read, as transformers does."""
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _unusable(what: str, where: str) -> UserError:
    return UserError("T024", f"the model's chat template cannot be used: {what}", where=where,
                     fix="correct the template, or choose another: data.samples.template=chatml")  # fmt: skip
