"""A sample as it was found: what is said, by whom, and where its images are."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trimaran.core import MixtureSource

Role = Literal["system", "user", "assistant", "text"]


@dataclass(frozen=True, slots=True)
class ImageLocation:
    """Bytes that stay where they are: `length` of them from `offset` on, or with -1 the whole file."""

    file: str
    offset: int = 0
    length: int = -1


Picture = ImageLocation | bytes  # bytes are copied into the index


@dataclass(frozen=True, slots=True)
class Turn:
    """What one speaker says; None in it is the next image. Of `text` and of an `assistant` every word is learnt."""

    role: Role
    parts: tuple[str | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSample:
    """One sample of a source, or with `bad` the reason why it cannot be used. `done` is the share read so far."""

    file: str
    row: int
    done: float = 0.0
    turns: tuple[Turn, ...] = ()
    images: tuple[Picture, ...] = ()
    bad: str | None = None

    @property
    def origin(self) -> str:
        return origin(self.file, self.row)


@dataclass(frozen=True, slots=True)
class Task:
    """A source and the files of it that were found, in order. `images` is the folder that image paths start from."""

    source: MixtureSource
    files: Sequence[Path]
    images: str | None = None


def origin(file: str, row: int) -> str:
    """Return how a person is told where a sample came from. Row 0 is a file that holds one sample."""
    return f"{file}:{row}" if row else file
