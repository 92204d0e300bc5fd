"""Fails if a page of the built site would fetch a script, a style, a font or a picture from elsewhere."""

import re
import sys
from pathlib import Path

FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|video)\b[^>]*\bsrc=["']?(?:https?:)?//[^"'> ]+"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|icon|preconnect|preload))[^>]*\bhref=["']?(?:https?:)?//[^"'> ]+"""
    r"""|url\(["']?(?:https?:)?//[^)]+"""
)

SHOWN = 10


def main(folder: Path) -> int:
    """Print what would be fetched, page by page, and return 1 if there is anything, else 0."""
    pages = [path for suffix in ("*.html", "*.css") for path in folder.rglob(suffix)]
    found = [(path, match) for path in pages for match in FETCHED.findall(path.read_text(encoding="utf-8"))]
    for path, match in found[:SHOWN]:
        print(f"{path.relative_to(folder)}: {match}", file=sys.stderr)
    if not pages:
        print(f"{folder} has no pages", file=sys.stderr)
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
