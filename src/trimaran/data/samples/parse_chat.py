"""From one row, as people write conversations, captions and texts, to turns and images.

Known are LLaVA's and ShareGPT's `conversations`, `messages` with plain content or with content parts, `texts` of user
and assistant pairs, questions with answers, captions, and plain text. Each row says by its fields which it is.
"""

import base64
import binascii
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimaran.data.quarantine import BadSampleError
from trimaran.data.samples.raw_sample import ImageLocation, Picture, Role, Turn

MARKER = "<image>"
ROLES: dict[str, Role] = {
    "system": "system", "human": "user", "user": "user", "tool": "user", "function": "user", "observation": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
}  # fmt: skip
CONVERSATIONS = ("conversations", "messages", "conversation", "dialogue")
QUESTIONS = (("prompt", "response"), ("prompt", "completion"), ("question", "answer"), ("instruction", "output"))
CAPTIONS = ("caption", "text")
IMAGES = ("images", "image", "image_path", "file_name")

Part = str | Picture | None  # None: the next image of the row


@dataclass(frozen=True, slots=True)
class RowImages:
    """The folder that image paths are relative to; nobody's rows lead out of it."""

    root: str

    def find(self, value: Any) -> Picture:
        """Return the image that a row names: a path, a data URI, bytes, or a mapping with one of them."""
        if isinstance(value, ImageLocation | bytes):
            return value
        if isinstance(value, Mapping):
            return self.find(next((value[key] for key in ("bytes", "path", "url", "image") if value.get(key)), None))
        if not isinstance(value, str) or not value:
            raise BadSampleError(f"an image is named by a {type(value).__name__} and not by a path")
        if value.startswith("data:"):
            return _inline(value)
        if value.startswith(("http://", "https://")):
            raise BadSampleError(f"images are not fetched from the net: {value[:80]}")
        path = os.path.normpath(os.path.join(self.root, value.removeprefix("file://")))
        if "\0" in path or not path.startswith(os.path.join(self.root, "")):
            raise BadSampleError(f"the path leads out of the folder of images: {value[:120]!r}")
        return ImageLocation(path)


def read_row(row: Any, finder: RowImages, text_field: str = "text") -> tuple[tuple[Turn, ...], tuple[Picture, ...]]:
    """Return what is said in a row and its images in the order they come in; BadSampleError when it is nothing."""
    if not isinstance(row, Mapping):
        raise BadSampleError(f"this is a {type(row).__name__} and not an object with fields")
    named = [finder.find(value) for value in _named(row)]
    turns = list(_turns(row, finder, text_field, split=bool(named)))
    learnt = [part for role, parts in turns if role in ("assistant", "text") for part in parts if isinstance(part, str)]
    if not any(learnt):
        raise BadSampleError("there is no text in it" if turns[0][0] == "text" else "there is no answer in it")
    num_places = sum(part is None for _, parts in turns for part in parts)
    if named and not num_places:
        first = next(number for number, (role, _) in enumerate(turns) if role != "system")
        turns[first] = (turns[first][0], [None] * len(named) + turns[first][1])
    elif num_places != len(named):
        raise BadSampleError(f"{num_places} places for images, but {len(named)} images")
    rest = iter(named)
    images: list[Picture] = []
    said = []
    for role, parts in turns:
        images += [next(rest) if part is None else part for part in parts if not isinstance(part, str)]
        said.append(Turn(role, tuple(part if isinstance(part, str) else None for part in parts)))
    return tuple(said), tuple(images)


def _named(row: Mapping[str, Any]) -> Iterator[Any]:
    """Yield what the row's own fields name as images, in order."""
    for field, value in row.items():
        if value is None or (field not in IMAGES and not _is_image(value)):
            continue
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            yield from value
        elif value != "":
            yield value


def _is_image(value: Any) -> bool:
    """Return whether this is how `datasets` and Parquet hold an image, or several."""
    if isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, Mapping) and value.keys() == {"bytes", "path"}


def _turns(
    row: Mapping[str, Any], finder: RowImages, text_field: str, *, split: bool
) -> Iterator[tuple[Role, list[Part]]]:
    """Yield who says what. Where the row names images, `<image>` in a text is the place of one."""
    for field in CONVERSATIONS:
        if row.get(field):
            yield from (_turn(turn, finder, split) for turn in _listed(row[field], field))
            return
    if row.get("texts"):
        for pair in _listed(row["texts"], "texts"):
            yield "user", _content(pair.get("user"), finder, split)
            yield "assistant", _content(pair.get("assistant"), finder, split)
        return
    for question, answer in QUESTIONS:
        if row.get(answer) is not None and row.get(question) is not None:
            more = [f"\n{row['input']}"] if isinstance(row.get("input"), str) and row["input"] else []
            yield "user", _content(row[question], finder, split) + more
            yield "assistant", _content(row[answer], finder, split)
            return
    for field in dict.fromkeys((text_field, *CAPTIONS)):
        if row.get(field) is not None:
            yield "text", _content(row[field], finder, split)
            return
    raise BadSampleError(f"none of its fields is a conversation or a text: {', '.join(map(str, row))[:120] or 'none'}")


def _turn(turn: Mapping[str, Any], finder: RowImages, split: bool) -> tuple[Role, list[Part]]:
    speaker = turn.get("from", turn.get("role"))
    if not isinstance(speaker, str) or speaker not in ROLES:
        raise BadSampleError(f"nobody knows the speaker {speaker!r}"[:120])
    return ROLES[speaker], _content(turn.get("value", turn.get("content")), finder, split)


def _content(content: Any, finder: RowImages, split: bool) -> list[Part]:
    if isinstance(content, str):
        if not split or MARKER not in content:
            return [content]
        pieces: list[Part] = [piece for text in content.split(MARKER) for piece in (text, None)]
        return pieces[:-1]
    if content is None:
        return [""]
    return [_content_part(part, finder) for part in _listed(content, "content", str)]


def _content_part(part: Any, finder: RowImages) -> Part:
    """Return one part of a message: its text, its image, or None for the row's next one."""
    if isinstance(part, str):
        return part
    kind = part.get("type", "text" if "text" in part else "image")
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind in ("image", "image_url"):
        value = next((part[key] for key in ("image", "image_url", "url", "path", "bytes") if part.get(key)), None)
        return None if value is None else finder.find(value)
    raise BadSampleError(f"a part of a message is of an unknown kind: {kind!r}"[:120])


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
