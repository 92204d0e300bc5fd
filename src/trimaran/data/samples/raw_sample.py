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
SizedImage = tuple[ImageSource, int, int]  # with its width and height


@dataclass(frozen=True, slots=True)
class FrameChoice:
    """Which frames of a video are used: `per_second`, and `most`, evenly spaced; so many `together` are one image.

    With `time_positions` the images of a video are one block: see `ImageRules`.
    """

    per_second: float = 1.0
    most: int = 16
    together: int = 1
    time_positions: int | None = None


DEFAULT_CHOICE = FrameChoice()


@dataclass(frozen=True, slots=True)
class Video:
    """The chosen frames of a video, seconds from its start, and, for one block, time positions from the first one's."""

    frames: tuple[ImageSource, ...]
    times: tuple[float, ...]
    positions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation; None in `parts` is the next image, or the next video that is one block.

    The roles `assistant` and `text` are targets. `fields` are the other fields of the message, such as `tool_calls`,
    for a model's own chat template; its `role` is the one to use there, such as `tool`. A message without content, such
    as a tool call, has no `has_content`. An answer that is context only is not `learnt`.
    """

    role: Role
    parts: tuple[str | None, ...]
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)
    has_content: bool = field(default=True, compare=False)
    learnt: bool = True

    @property
    def is_target(self) -> bool:
        return self.learnt and self.role in ("assistant", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSample:
    """One sample of a source; with `bad`, the reason why it cannot be used. `fraction_read` is the progress.

    `tools` and `system` are fields of the row beside its conversation: schemas of tools, and a system prompt.
    """

    file: str
    row: int
    fraction_read: float = 0.0
    turns: tuple[Turn, ...] = ()
    images: tuple[ImageSource | Video, ...] = ()
    bad: str | None = None
    tools: tuple[Any, ...] = ()
    system: str = ""

    @property
    def origin(self) -> str:
        return origin(self.file, self.row)

    @property
    def single_images(self) -> tuple[ImageSource, ...]:
        """All images, with those of the videos."""
        each_of = (each.frames if isinstance(each, Video) else (each,) for each in self.images)
        return tuple(image for images in each_of for image in images)


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """A source and its files, in order. `images` is the folder that image paths are relative to."""

    source: MixtureSource
    files: Sequence[Path]
    images: str | None = None
    frames: FrameChoice = DEFAULT_CHOICE


def origin(file: str, row: int) -> str:
    """Return where a sample came from, for messages. Row 0 means that the file holds a single sample."""
    return f"{file}:{row}" if row else file
