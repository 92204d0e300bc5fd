"""Lists the Chinese pages that are missing or older than their English source; fails only if a page is wrong.

The first line of each page of docs/zh names its source and the digest of the text that was translated:
`<!-- source: docs/guides/planning.md sha256:0123456789ab -->`. English changes first, so a stale page is a line of
output. A page without such a line, whose source is gone, or with a link that leads nowhere, fails.
`--stamp PAGE` writes the current digest into a page that was brought up to date.
"""

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHINESE = ROOT / "docs" / "zh"
HEAD = re.compile(r"<!-- source: (\S+) sha256:([0-9a-f]{12}) -->\n")
LINK = re.compile(r"\]\(([^)#\s]+)")
FENCE = re.compile(r"^```[^\n]*\n.*?^```$", re.MULTILINE | re.DOTALL)
GENERATED = {"docs/reference/commands.md", "docs/reference/recipe.md"}  # by site_hooks.py
# Pages for people who work on Trimaran itself, or tables of results: they stay English.
ENGLISH_ONLY = {
    "docs/log.md", "docs/tour.md", "docs/accuracy.md", "docs/benchmarks.md", "docs/parity.md", "docs/parity-nccl.md",
    "docs/hf-sweep.md",
}  # fmt: skip


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def source_pages() -> list[Path]:
    """Return the English pages that users read: README, the top of docs/ and the guides."""
    pages = [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "docs" / "guides").glob("*.md")),
    ]
    return [page for page in pages if page.relative_to(ROOT).as_posix() not in ENGLISH_ONLY]


def chinese_of(source: Path) -> Path:
    """Return where the Chinese page of an English one is."""
    name = source.relative_to(ROOT).as_posix()
    return CHINESE / ("README.md" if name == "README.md" else name.removeprefix("docs/"))


def wrong_pages() -> Iterator[str]:
    """Yield what is wrong with pages: no head, a source that is gone, links that lead nowhere."""
    for page in sorted(CHINESE.rglob("*.md")):
        name, text = page.relative_to(ROOT), page.read_text(encoding="utf-8")
        head = HEAD.match(text)
        if head is None:
            yield f"{name}: the first line does not name its source and digest"
        elif not (ROOT / head[1]).is_file() or chinese_of(ROOT / head[1]) != page:
            yield f"{name}: its source {head[1]} does not exist, or belongs to another page"
        for target in LINK.findall(FENCE.sub("", text)):
            path = (page.parent / target).resolve()
            known = path.exists() or (path.is_relative_to(ROOT) and path.relative_to(ROOT).as_posix() in GENERATED)
            if "://" not in target and not known:
                yield f"{name}: the link {target} leads nowhere"


def stale_pages() -> Iterator[str]:
    """Yield the sources whose Chinese page is missing, or was made of another text."""
    for source in source_pages():
        name, page = source.relative_to(ROOT), chinese_of(source)
        if not page.is_file():
            yield f"missing: {name}"
        elif (head := HEAD.match(page.read_text(encoding="utf-8"))) and head[2] != digest_of(source.read_text()):
            yield f"stale:   {name}"


def stamp(page: Path) -> None:
    """Write the digest of its source into a page."""
    text = page.read_text(encoding="utf-8")
    head = HEAD.match(text)
    source = head[1] if head else ""
    if head is None or not (ROOT / source).is_file():
        raise SystemExit(f"{page}: the first line does not name its source")
    line = f"<!-- source: {source} sha256:{digest_of((ROOT / source).read_text(encoding='utf-8'))} -->\n"
    page.write_text(line + text[head.end() :], encoding="utf-8")


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--stamp"]:
        for name in arguments[1:]:
            stamp(Path(name).resolve())
        return 0
    stale, wrong = list(stale_pages()), list(wrong_pages())
    for line in [*stale, *wrong]:
        print(line)
    total = len(source_pages())
    print(f"docs/zh: {total - len(stale)} of {total} pages are up to date, {len(wrong)} problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
