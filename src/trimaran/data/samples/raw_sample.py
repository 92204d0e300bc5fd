"""A sample as read from a source: its turns, and where its images are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trimaran.core import MixtureSource

Role = Literal["system", "user", "assistant", "text"]


@dataclass(frozen=True, slots=True)
class ImageLocation:
    """An image in a file: `length` bytes from `offset` on; -1 means the full file."""

    file: str
    offset: int = 0
    length: int = -1


ImageSource = ImageLocation | bytes  # bytes are copied into the index


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation; None in `parts` is the next image. The roles `assistant` and `text` are targets.

    `fields` are the other fields of the message, such as `tool_calls`, for a model's own chat template; its `role` is
    the one to use there, such as `tool`. A message without content, such as a tool call, has no `has_content`.
    """

    role: Role
    parts: tuple[str | None, ...]
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)
    has_content: bool = field(default=True, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSample:
    """One sample of a source; with `bad`, the reason why it cannot be used. `fraction_read` is the progress.

    `tools` and `system` are fields of the row beside its conversation: schemas of tools, and a system prompt.
    """

    file: str
    row: int
    fraction_read: float = 0.0
    turns: tuple[Turn, ...] = ()
    images: tuple[ImageSource, ...] = ()
    bad: str | None = None
    tools: tuple[Any, ...] = ()
    system: str = ""

    @property
    def origin(self) -> str:
        return origin(self.file, self.row)


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """A source and its files, in order. `images` is the folder that image paths are relative to.

    `frames` says how many frames of a video are used: per second, and at most; `frames_together` share a patch.
    """

    source: MixtureSource
    files: Sequence[Path]
    images: str | None = None
    frames: tuple[float, int] = (1.0, 16)
    frames_together: int = 1


def origin(file: str, row: int) -> str:
    """Return where a sample came from, for messages. Row 0 means that the file holds a single sample."""
    return f"{file}:{row}" if row else file
