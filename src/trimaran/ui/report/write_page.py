"""Writes an HTML page. It replaces an older page, and no other file."""

from pathlib import Path

from trimaran.core import UserError
from trimaran.core.regular_files import open_regular_file


def write_page(path: Path, page: str, *, option: str) -> None:
    """Write the page to the file that `option` names; raise UserError if that is another kind of file, or fails."""
    beginning = page[: page.index("\n")]
    try:
        if path.exists() and path.stat().st_size and not _begins_with(path, beginning):
            raise UserError("A020", "this file already exists and is not an HTML page", where=str(path),
                            fix=f"name another file: {option} page.html")  # fmt: skip
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError("A020", f"the page cannot be written: {error.strerror}", where=str(path),
                        fix=f"name a file that you can write: {option} page.html") from None  # fmt: skip


def _begins_with(path: Path, text: str) -> bool:
    with open_regular_file(path, follow_links=True) as file:
        return file.read(len(text)) == text.encode()
