"""Parses one row of a conversation, caption or text dataset into turns and images.

Supports the `conversations` of LLaVA and ShareGPT, `messages` with plain content or content parts, `texts` with user
and assistant pairs, question and answer fields, captions, and plain text. The fields of a row decide which it is.
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
from trimaran.data.samples.raw_sample import DEFAULT_CHOICE, FrameChoice, ImageLocation, ImageSource, Role, Turn, Video
from trimaran.data.samples.videos import VIDEO_SUFFIXES, read_video

MARKER = "<image>"
ROLES: dict[str, Role] = {
    "system": "system", "human": "user", "user": "user", "tool": "user", "function": "user", "observation": "user",
    "ipython": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
}  # fmt: skip
TOOL_ROLES = ("tool", "function", "observation", "ipython")
CONTENT_FIELDS = ("from", "value", "role", "content")
CONVERSATIONS = ("conversations", "messages", "conversation", "dialogue")
QUESTIONS = (("prompt", "response"), ("prompt", "completion"), ("question", "answer"), ("instruction", "output"))
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
            return _inline(value)
        if value.startswith(("http://", "https://")):
            raise BadSampleError(f"images are not downloaded: {value[:80]}")
        path = os.path.normpath(os.path.join(self.root, value.removeprefix("file://")))
        if "\0" in path or not path.startswith(os.path.join(self.root, "")):
            raise BadSampleError(f"the path leaves the image folder: {value[:120]!r}")
        return ImageLocation(path)


def read_row(
    row: Any, finder: ImageFinder, text_field: str = "text"
) -> tuple[tuple[Turn, ...], tuple[ImageSource | Video, ...]]:
    """Return the turns of a row and its images in order; a video that is one block is among them.

    Raises BadSampleError if the row has no targets.
    """
    if not isinstance(row, Mapping):
        raise BadSampleError(f"this is a {type(row).__name__} and not an object with fields")
    row_images = [finder.find(value) for value in _image_references(row)]
    videos = list(_video_references(row, finder))
    turns = list(_turns(row, finder, text_field, split=bool(row_images)))
    turns = [_with_frames(turn) for turn in _with_videos(turns, videos)]
    if not any(_has_target(turn) for turn in turns):
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
        parsed.append(Turn(turn.role, parts, turn.fields, turn.has_content))
    return tuple(parsed), tuple(images)


def read_extras(row: Any) -> tuple[tuple[Any, ...], str]:
    """Return the tools of a row, which may be written as JSON text, and its system prompt beside the conversation."""
    if not isinstance(row, Mapping) or not any(row.get(field) for field in CONVERSATIONS):
        return (), ""
    tools, system = row.get("tools"), row.get("system")
    tools = parsed_json(tools) if isinstance(tools, str) and tools.strip() else tools
    if tools and not (isinstance(tools, list) and all(isinstance(each, Mapping) for each in tools)):
        raise BadSampleError("the field 'tools' is not a list of objects")
    return tuple(tools or ()), system if isinstance(system, str) else ""


def parsed_json(text: str) -> Any:
    """Return the value that a text holds as JSON; the text itself if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def without_arrow_nulls(row: Any) -> Any:
    """Return a row of Parquet or Arrow whose conversation and tools have only the fields that they were written with.

    Arrow gives every object the fields of all objects in its column; those that it did not have are null.
    """
    if not isinstance(row, Mapping):
        return row
    return {key: _without_nulls(value) if key in (*CONVERSATIONS, "tools") else value for key, value in row.items()}


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


def _video_references(row: Mapping[str, Any], finder: ImageFinder) -> Iterator[Video]:
    """Yield the videos in the row's own fields, in order. `fps` and `times` of one video may be beside it."""
    for field in VIDEO_FIELDS:
        value = row.get(field)
        for each in value if isinstance(value, list) else [] if value in (None, "") else [value]:
            beside = {name: row[name] for name in ("fps", "times") if row.get(name) is not None}
            is_folder = isinstance(each, str) and not each.lower().endswith(VIDEO_SUFFIXES)
            yield read_video({"frames": each, **beside} if is_folder else each, finder.find, finder.frames)


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
    return [
        replace(turn, parts=(*videos, *turn.parts)) if number == first else turn for number, turn in enumerate(turns)
    ]


def _with_frames(turn: _ParsedTurn) -> _ParsedTurn:
    """Return the turn with the frames of its videos as images, each after its time. A video of one block stays.

    A caption is learnt completely, so the times are left out there.
    """
    parts: list[TurnPart] = []
    for part in turn.parts:
        if not isinstance(part, Video) or part.positions:
            parts.append(part)
            continue
        for frame, seconds in zip(part.frames, part.times, strict=True):
            parts += [frame] if turn.role in ("assistant", "text") else [f"<{seconds:.1f} seconds>", frame]
    return replace(turn, parts=parts)


def _has_target(turn: _ParsedTurn) -> bool:
    has_text = any(part for part in turn.parts if isinstance(part, str))
    return turn.role in ("assistant", "text") and (has_text or bool(turn.fields.get("tool_calls")))


def _image_references(row: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the image references in the row's own fields, in order."""
    for field, value in row.items():
        if value is None or (field not in IMAGES and not _is_image(value)):
            continue
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            yield from value
        elif value != "":
            yield value


def _is_image(value: Any) -> bool:
    """Return whether the value is an image, or a list of images, as `datasets` and Parquet store them."""
    if isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, Mapping) and value.keys() == {"bytes", "path"}


def _turns(row: Mapping[str, Any], finder: ImageFinder, text_field: str, *, split: bool) -> Iterator[_ParsedTurn]:
    """Yield each turn. With `split`, `<image>` in a text marks an image of the row."""
    for field in CONVERSATIONS:
        if row.get(field):
            yield from (_turn(turn, finder, split) for turn in _listed(row[field], field))
            return
    if row.get("texts"):
        for pair in _listed(row["texts"], "texts"):
            yield _ParsedTurn("user", _content(pair.get("user"), finder, split))
            yield _ParsedTurn("assistant", _content(pair.get("assistant"), finder, split))
        return
    for question, answer in QUESTIONS:
        if row.get(answer) is not None and row.get(question) is not None:
            extra = [f"\n{row['input']}"] if isinstance(row.get("input"), str) and row["input"] else []
            yield _ParsedTurn("user", _content(row[question], finder, split) + extra)
            yield _ParsedTurn("assistant", _content(row[answer], finder, split))
            return
    for field in dict.fromkeys((text_field, *CAPTIONS)):
        if row.get(field) is not None:
            yield _ParsedTurn("text", _content(row[field], finder, split))
            return
    raise BadSampleError(f"none of its fields is a conversation or a text: {', '.join(map(str, row))[:120] or 'none'}")


def _turn(turn: Mapping[str, Any], finder: ImageFinder, split: bool) -> _ParsedTurn:
    role = turn.get("from", turn.get("role"))
    if not isinstance(role, str) or role not in ROLES:
        raise BadSampleError(f"the role {role!r} is unknown"[:120])
    content = turn.get("value", turn.get("content"))
    parts = _content(content, finder, split)
    fields = {key: value for key, value in turn.items() if key not in CONTENT_FIELDS and value is not None}
    if fields.get("tool_calls"):
        fields["tool_calls"] = [_tool_call(each) for each in _listed(fields["tool_calls"], "tool_calls")]
    if role in TOOL_ROLES:
        fields["role"] = "tool"
    if content is None and "content" in turn:
        fields["content"] = None
    return _ParsedTurn(ROLES[role], parts, fields, has_content=content is not None)


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call whose arguments are an object, as templates expect, and not JSON text, as in OpenAI's API."""
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    changed = {**function, "arguments": parsed_json(function["arguments"])}
    return {**call, "function": changed} if "function" in call else changed


def _content(content: Any, finder: ImageFinder, split: bool) -> list[TurnPart]:
    if isinstance(content, str):
        if not split or MARKER not in content:
            return [content]
        parts: list[TurnPart] = [part for text in content.split(MARKER) for part in (text, None)]
        return parts[:-1]
    if content is None:
        return [""]
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


def _inline(uri: str) -> bytes:
    head, _, data = uri.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError
        return base64.b64decode(data, validate=True)
    except (ValueError, binascii.Error):
        raise BadSampleError("an image inside the row is not base64") from None
