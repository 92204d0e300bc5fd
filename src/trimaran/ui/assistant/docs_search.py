"""Full-text search of the documentation, by section."""

import re
import sqlite3
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

INSTALLED = "share/trimaran/docs"  # below the data folder of the environment; see data-files in pyproject.toml
HEADING = re.compile(r"^#{1,4} +(.+?) *$", re.MULTILINE)
PAGES = ("*.md", "guides/*.md", "course/*.md", "codes/*.md", "decisions/*.md")
WORD = re.compile(r"\w+")


class DocsSection(NamedTuple):
    """A section of a page: `page` is its path below docs/."""

    page: str
    heading: str
    text: str


def docs_folder() -> Path | None:
    """Return the documentation's folder: of the checkout, or of the installed package; None if there is none."""
    checkout = Path(__file__).parents[4] / "docs"
    installed = Path(sysconfig.get_path("data")) / INSTALLED
    return next((each for each in (checkout, installed) if (each / "guides").is_dir()), None)


@dataclass(frozen=True, slots=True)
class DocsIndex:
    """The pages of a folder in an SQLite full-text table; titles weigh more than text."""

    folder: Path
    _table: sqlite3.Connection

    @classmethod
    def of_folder(cls, folder: Path) -> "DocsIndex":
        """Read all pages. Takes about a tenth of a second."""
        table = sqlite3.connect(":memory:", check_same_thread=False)
        table.execute("create virtual table sections using fts5(page, heading, text, tokenize='porter unicode61')")
        table.executemany("insert into sections values (?, ?, ?)", _sections(folder))
        return cls(folder, table)

    def search(self, query: str, count: int) -> list[DocsSection]:
        words = [f'"{word}"' for word in WORD.findall(query)]
        if not words:
            return []
        order = "order by bm25(sections, 4.0, 8.0, 1.0) limit ?"
        for joint in (" AND ", " OR "):  # sections with all words first; if there are none, those with some
            rows = self._table.execute(f"select page, heading, text from sections where sections match ? {order}",
                                       (joint.join(words), count)).fetchall()  # fmt: skip
            if rows:
                return [DocsSection(*row) for row in rows]
        return []

    def pages(self) -> list[str]:
        return [row[0] for row in self._table.execute("select distinct page from sections order by page")]

    def page(self, name: str) -> str | None:
        return (self.folder / name).read_text(encoding="utf-8") if name in self.pages() else None


def _sections(folder: Path) -> Iterator[DocsSection]:
    for path in sorted(each for pattern in PAGES for each in folder.glob(pattern)):
        page, text = path.relative_to(folder).as_posix(), path.read_text(encoding="utf-8")
        # Not those inside of code blocks.
        starts = [match.start() for match in HEADING.finditer(text) if text.count("\n```", 0, match.start()) % 2 == 0]
        for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
            title, _, body = text[start:end].partition("\n")
            yield DocsSection(page, title.lstrip("# ").strip(), body.strip())
