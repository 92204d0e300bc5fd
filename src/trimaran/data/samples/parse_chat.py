"""Parses one row of a conversation, caption or text dataset into turns and images.

Supports the `conversations` of LLaVA and ShareGPT, `messages` with plain content or content parts, `texts` with user
and assistant pairs, question and answer fields (`QUESTIONS`), captions, and plain text. The fields of a row decide
which it is, unless `data.text_field` names one.
"""

import base64
import binascii
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trimaran.data.quarantine import BadSampleError
from trimaran.data.row_fields import (
    CONTEXTS,
    CONVERSATIONS,
    PREFERENCE_REASON,
    QUESTIONS,
    SYSTEMS,
    answer_fields,
    field_of,
    is_messages,
    learns_rejected,
)
from trimaran.data.samples.raw_sample import DEFAULT_CHOICE, FrameChoice, ImageLocation, ImageSource, Role, Turn, Video
from trimaran.data.samples.videos import VIDEO_SUFFIXES, read_video

MARKER = "<image>"
ROLES: dict[str, Role] = {
    "system": "system", "developer": "system", "human": "user", "user": "user", "tool": "user", "function": "user",
    "observation": "user", "ipython": "user", "tool_response": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
TOOL_ROLES = ("tool", "function", "observation", "ipython", "tool_response")
TOOL_FIELDS = ("tools", "functions")  # the second was OpenAI's first
CALL_ROLES = ("function_call", "tool_call")  # of ShareGPT: the content is the call, as JSON
CONTENT_FIELDS = ("from", "value", "role", "content")
# Of an answer: OpenAI's, ms-swift's and axolotl's; 0 or false: not learnt.
LOSS_FIELDS = ("weight", "loss", "train", "training")
DEFAULT_FIELD = "text"  # of data.text_field
CAPTIONS = ("caption", "text")
IMAGES = ("images", "image", "image_path", "file_name")

VIDEO_FIELDS, VIDEO_MARKER = ("video", "videos"), "<video>"

TurnPart = str | ImageSource | Video | None  # None: the next image of the row


@dataclass(frozen=True, slots=True)
class ImageFinder:
    """Resolves image references. Paths are relative to `root` and may not leave it. `frames` of a video are chosen."""

    root: str
    frames: FrameChoice = DEFAULT_CHOICE

    def find(self, value: Any) -> ImageSource:
        """Return the image of a reference: a path, a data URI, bytes, or a mapping with one of them."""
        if isinstance(value, ImageLocation | bytes):
            return value
        if isinstance(value, Mapping):
            return self.find(next((value[key] for key in ("bytes", "path", "url", "image") if value.get(key)), None))
        if not isinstance(value, str) or not value:
            raise BadSampleError(f"an image reference is a {type(value).__name__} and not a path")
        if value.startswith("data:"):
            head, _, data = value.partition(",")
            try:
                if not head.endswith(";base64"):
                    raise ValueError
                return base64.b64decode(data, validate=True)
            except (ValueError, binascii.Error):
                raise BadSampleError("an image inside the row is not base64") from None
        if value.startswith(("http://", "https://")):
            raise BadSampleError(f"images are not downloaded: {value[:80]}")
        path = os.path.normpath(os.path.join(self.root, value.removeprefix("file://")))
        if "\0" in path or not path.startswith(os.path.join(self.root, "")):
            raise BadSampleError(f"the path leaves the image folder: {value[:120]!r}")
        return ImageLocation(path)


def read_row(
    row: Any, finder: ImageFinder, text_field: str = "text"
) -> tuple[tuple[Turn, ...], tuple[ImageSource | Video, ...]]:
    """Return the turns of a row, and its images and one-block videos in order. No targets raise BadSampleError."""
    if not isinstance(row, Mapping):
        raise BadSampleError(f"this is a {type(row).__name__} and not an object with fields")
    row_images = []
    for field, value in row.items():
        first = value[0] if isinstance(value, list) and value else value
        # As `datasets` and Parquet store an image.
        is_image = isinstance(first, Mapping) and first.keys() == {"bytes", "path"}
        if value is not None and value != "" and (field in IMAGES or is_image):
            is_listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
            row_images += [finder.find(each) for each in (value if is_listed else [value])]
    videos = []
    for field in VIDEO_FIELDS:
        value = row.get(field)
        for each in value if isinstance(value, list) else [] if value in (None, "") else [value]:
            beside = {name: row[name] for name in ("fps", "times") if row.get(name) is not None}  # of one video
            is_folder = isinstance(each, str) and not each.lower().endswith(VIDEO_SUFFIXES)
            videos.append(read_video({"frames": each, **beside} if is_folder else each, finder.find, finder.frames))
    turns = []
    for turn in _with_videos(list(_turns(row, finder, text_field, split=bool(row_images))), videos):
        mixed: list[TurnPart] = []
        for part in turn.parts:
            if not isinstance(part, Video) or part.positions:
                mixed.append(part)
                continue
            # Other videos become frames, each after its time. A caption is learnt completely, so it has no times.
            for frame, seconds in zip(part.frames, part.times, strict=True):
                mixed += [frame] if turn.role in ("assistant", "text") else [f"<{seconds:.1f} seconds>", frame]
        turns.append(replace(turn, parts=mixed))
    targets = [
        turn
        for turn in turns
        if turn.role in ("assistant", "text")
        and (any(part for part in turn.parts if isinstance(part, str)) or turn.fields.get("tool_calls"))
    ]
    if not any(turn.learnt for turn in targets):
        if targets:
            raise BadSampleError("no answer is learnt: they are part of the prompt, or their weight is 0")
        raise BadSampleError("it has no text" if turns[0].role == "text" else "it has no answer")
    num_markers = sum(part is None for turn in turns for part in turn.parts)
    if row_images and not num_markers:
        first = next(number for number, turn in enumerate(turns) if turn.role != "system")
        turns[first] = replace(turns[first], parts=(*[None] * len(row_images), *turns[first].parts))
    elif num_markers != len(row_images):
        raise BadSampleError(f"{num_markers} image markers, but {len(row_images)} images")
    rest = iter(row_images)
    images: list[ImageSource | Video] = []
    parsed = []
    for turn in turns:
        images += [next(rest) if part is None else part for part in turn.parts if not isinstance(part, str)]
        parts = tuple(part if isinstance(part, str) else None for part in turn.parts)
        parsed.append(Turn(turn.role, parts, turn.fields, turn.has_content, turn.learnt))
    return tuple(parsed), tuple(images)


def read_extras(row: Mapping[str, Any]) -> tuple[tuple[Any, ...], str]:
    """Return the tools beside a conversation, which may be written as JSON text, and its system prompt."""
    name, tools = next(((name, row[name]) for name in TOOL_FIELDS if row.get(name)), ("", None))
    system = next((row[name] for name in SYSTEMS if row.get(name)), "")
    tools = parsed_json(tools) if isinstance(tools, str) and tools.strip() else tools
    if tools and not (isinstance(tools, list) and all(isinstance(each, Mapping) for each in tools)):
        raise BadSampleError(f"the field '{name}' is not a list of objects")
    if not isinstance(system, str):
        raise BadSampleError("the system prompt beside the conversation is not a text")
    found = []
    for tool in tools or ():  # ShareGPT's tools are the functions themselves
        is_bare = isinstance(tool.get("name"), str) and "parameters" in tool and not {"type", "function"} & tool.keys()
        found.append({"type": "function", "function": tool} if is_bare else tool)
    return tuple(found), system


def parsed_json(text: str) -> Any:
    """Return the value that a text holds as JSON; the text itself if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def without_arrow_nulls(row: Any) -> Any:
    """Return a row of Parquet or Arrow whose messages and tools have only the fields that they were written with."""
    # Arrow gives every object the fields of all objects in its column; those that it did not have are null.
    if not isinstance(row, Mapping):
        return row
    return {
        key: _without_nulls(value) if key in (*CONVERSATIONS, *TOOL_FIELDS) or is_messages(value) else value
        for key, value in row.items()
    }


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class _ParsedTurn:
    """A turn whose parts may still be images."""

    role: Role
    parts: Sequence[TurnPart]
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    has_content: bool = True
    learnt: bool = True


def _with_videos(turns: list[_ParsedTurn], videos: list[Video]) -> list[_ParsedTurn]:
    """Return the turns with the row's videos where `<video>` marks them, or at the start of the first question."""
    if not videos:
        return turns
    rest, marked = iter(videos), []
    texts = (part for turn in turns for part in turn.parts if isinstance(part, str))
    if num_markers := sum(text.count(VIDEO_MARKER) for text in texts):
        if num_markers != len(videos):
            raise BadSampleError(f"{num_markers} video markers, but {len(videos)} videos")
        for turn in turns:
            parts: list[TurnPart] = []
            for part in turn.parts:
                first, *others = part.split(VIDEO_MARKER) if isinstance(part, str) else (part,)
                parts += [first, *(each for text in others for each in (next(rest), text))]
            marked.append(replace(turn, parts=parts))
        return marked
    first = next(number for number, turn in enumerate(turns) if turn.role != "system")
    changed = replace(turns[first], parts=(*videos, *turns[first].parts))
    return [*turns[:first], changed, *turns[first + 1 :]]


def _turns(row: Mapping[str, Any], finder: ImageFinder, text_field: str, *, split: bool) -> Iterator[_ParsedTurn]:
    """Yield each turn. With `split`, `<image>` in a text marks an image of the row."""
    if learns_rejected(row, text_field):
        raise BadSampleError(PREFERENCE_REASON)
    fields = _named_answer(row, text_field) or answer_fields(row)
    if row.get("texts") and len(fields) != 1:
        for pair in _listed(row["texts"], "texts"):
            yield _ParsedTurn("user", _content(pair.get("user"), finder, split))
            yield _ParsedTurn("assistant", _content(pair.get("assistant"), finder, split))
        return
    if len(fields) == 2:
        yield from _pair(row, *fields, finder, split)
        return
    if fields:
        value = field_of(row, fields[0])
        messages = parsed_json(value) if isinstance(value, str) else value
        yield from (_turn(turn, finder, split) for turn in _listed(messages, fields[0]))
        return
    for field in dict.fromkeys((text_field, *CAPTIONS)):
        if (value := field_of(row, field)) is not None:
            yield _ParsedTurn("text", _content(value, finder, split))
            return
    raise BadSampleError(f"none of its fields is a conversation or a text: {', '.join(map(str, row))[:120] or 'none'}")


def _named_answer(row: Mapping[str, Any], text_field: str) -> tuple[str, ...]:
    """Return the conversation that `data.text_field` names, or the question and the answer; empty for a text."""
    value = field_of(row, text_field)
    if not value or text_field == DEFAULT_FIELD:
        return ()
    if "chosen" in text_field or text_field in (answer for _, answer in QUESTIONS):
        questions = ("conversations", *(question for question, _ in QUESTIONS))
        asked = next((name for name in questions if row.get(name) is not None and name != text_field), None)
        if asked is not None:
            return asked, text_field
    return (text_field,) if text_field in CONVERSATIONS or is_messages(value) else ()


def _pair(
    row: Mapping[str, Any], question: str, answer: str, finder: ImageFinder, split: bool
) -> Iterator[_ParsedTurn]:
    """Yield a question and its answer, each a text or messages. Answers in the question are not learnt."""
    asked, answered = row[question], field_of(row, answer)
    answered = [answered] if isinstance(answered, Mapping) else answered
    history = row.get("history")  # the questions and answers before those of the row, as Alpaca has them
    history = (parsed_json(history) if isinstance(history, str) and history.strip() else history) or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in history
    ):
        raise BadSampleError("the field 'history' is not a list of questions with their answers")
    for before, after in history:
        yield _ParsedTurn("user", _content(before, finder, split))
        yield _ParsedTurn("assistant", _content(after, finder, split))
    if is_messages(asked):
        repeated = is_messages(answered) and answered[: len(asked)] == asked
        yield from (replace(_turn(turn, finder, split), learnt=False) for turn in asked if not repeated)
    elif not is_messages(answered) or not any(  # an answer may be a complete conversation, with this question
        each.get("from", each.get("role")) in ("user", "human") and each.get("value", each.get("content")) == asked
        for each in answered
    ):
        beside = {name: row[name] for name in CONTEXTS if name != question and row.get(name)}
        if wrong := next((name for name, text in beside.items() if not isinstance(text, str)), ""):
            raise BadSampleError(f"the field '{wrong}' beside the question is not a text")
        yield _ParsedTurn("user", _content(asked, finder, split) + [f"\n{text}" for text in beside.values()])
    if is_messages(answered):
        yield from (_turn(turn, finder, split) for turn in answered)
    else:
        yield _ParsedTurn("assistant", _content(answered, finder, split))


def _turn(turn: Mapping[str, Any], finder: ImageFinder, split: bool) -> _ParsedTurn:
    role = turn.get("from", turn.get("role"))
    if not isinstance(role, str) or role not in ROLES:
        raise BadSampleError(f"the role {role!r} is unknown"[:120])
    content = turn.get("value", turn.get("content"))
    fields = {key: value for key, value in turn.items() if key not in CONTENT_FIELDS and value is not None}
    if fields.get("weight", 1) not in (0, 1):
        raise BadSampleError(f"the weight of a message is {fields['weight']!r} and not 0 or 1"[:120])
    given = [name for name in LOSS_FIELDS if name in fields and (name == "weight" or isinstance(fields[name], bool))]
    if fields.get("train_detail"):
        raise BadSampleError("only a part of a message is to be learnt (train_detail), which is not available")
    values = [fields.pop(name) for name in given]
    if role in CALL_ROLES:
        fields["tool_calls"] = _written_calls(content)
        content = ""
    elif ROLES[role] == "assistant" and fields.get("function_call"):
        fields["tool_calls"] = _written_calls(fields.pop("function_call"))
    parts = _content(content, finder, split)
    if fields.get("tool_calls"):
        calls: list[dict[str, Any]] = []
        for call in _listed(fields["tool_calls"], "tool_calls"):
            # Templates expect arguments as an object, and not as JSON text, as in OpenAI's API.
            function = call.get("function", call)
            changed = dict(call)
            if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
                changed = {**function, "arguments": parsed_json(function["arguments"])}
                changed = {**call, "function": changed} if "function" in call else changed
            calls.append(changed)
        fields["tool_calls"] = calls
    if role in TOOL_ROLES or role == "developer":
        fields["role"] = "developer" if role == "developer" else "tool"
    if content is None and "content" in turn:
        fields["content"] = None
    return _ParsedTurn(ROLES[role], parts, fields, has_content=content is not None, learnt=all(values))


def _written_calls(content: Any) -> list[dict[str, Any]]:
    """Return the tool calls that a message has as JSON text: one, or a list of them."""
    calls = parsed_json(content) if isinstance(content, str) else content
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(each, Mapping) and isinstance(each.get("name"), str) for each in calls):
        raise BadSampleError('a tool call is not JSON such as {"name": "...", "arguments": {...}}')
    return [{"type": "function", "function": dict(each)} for each in calls]


def _content(content: Any, finder: ImageFinder, split: bool) -> list[TurnPart]:
    if isinstance(content, str):
        if not split or MARKER not in content:
            return [content]
        parts: list[TurnPart] = [part for text in content.split(MARKER) for part in (text, None)]
        return parts[:-1]
    if content is None:
        return [""]
    if isinstance(content, list) and len(content) > 1 and all(isinstance(part, str) for part in content):
        raise BadSampleError(f"it has {len(content)} texts where one is expected, such as several answers")
    return [_content_part(part, finder) for part in _listed(content, "content", str)]


def _content_part(part: Any, finder: ImageFinder) -> TurnPart:
    """Return one part of a message: text, an image, or None for the row's next image."""
    if isinstance(part, str):
        return part
    kind = part.get("type", "text" if "text" in part else "image")
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind in ("image", "image_url"):
        value = next((part[key] for key in ("image", "image_url", "url", "path", "bytes") if part.get(key)), None)
        return None if value is None else finder.find(value)
    if kind == "video":
        return read_video(part.get("video"), finder.find, finder.frames)
    raise BadSampleError(f"a message part has an unknown type: {kind!r}"[:120])


def _listed(value: Any, field: str, *others: type) -> list[Any]:
    """Return `value`, which must be a list of objects."""
    if not isinstance(value, list) or not all(isinstance(each, (Mapping, *others)) for each in value):
        raise BadSampleError(f"the field '{field}' is not a list of objects")
    return value
