"""The Chinese pages: commands and code of the English ones, their heads, and the list of what is stale."""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trimaran.core import MESSAGES, messages

ROOT = Path(__file__).parents[2]
CHINESE = ROOT / "docs" / "zh"
CHECK = ROOT / "ops" / "site" / "check_zh.py"
HEAD = re.compile(r"<!-- source: (\S+) sha256:([0-9a-f]{12}) -->\n")
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = sorted(CHINESE.rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(CHINESE).as_posix())
def test_a_page_that_is_up_to_date_has_the_code_of_its_english_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    head = HEAD.match(text)
    assert head is not None
    english = (ROOT / head[1]).read_text(encoding="utf-8")
    if hashlib.sha256(english.encode()).hexdigest()[:12] != head[2]:
        pytest.skip("older than its English page: `make zh` lists it")
    assert FENCE.findall(text) == FENCE.findall(english)
    assert re.search(r"[\u4e00-\u9fff]", FENCE.sub("", text)) is not None


def run_check(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(root / "ops" / "site" / "check_zh.py"), *arguments], text=True,
                          capture_output=True, check=False)  # fmt: skip


def test_the_pages_of_this_repository_are_right() -> None:
    done = run_check(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A repository with two English pages, of which one has a Chinese page that is up to date."""
    for folder in ("docs/guides", "docs/zh/guides", "ops/site"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "ops/site/check_zh.py").write_text(CHECK.read_text())
    (tmp_path / "README.md").write_text("# Title\n")
    (tmp_path / "docs/guides/a.md").write_text("# A\n")
    page = tmp_path / "docs/zh/guides/a.md"
    page.write_text("<!-- source: docs/guides/a.md sha256:000000000000 -->\n\n# 甲\n\n[a](../../guides/a.md)\n")
    assert run_check(tmp_path, "--stamp", str(page)).returncode == 0
    return tmp_path


def test_stale_and_missing_pages_are_listed_and_do_not_fail(small: Path) -> None:
    assert run_check(small).stdout.splitlines() == [
        "missing: README.md", "docs/zh: 1 of 2 pages are up to date, 0 problems"
    ]  # fmt: skip
    (small / "docs/guides/a.md").write_text("# A, changed\n")
    done = run_check(small)
    assert done.returncode == 0
    assert "stale:   docs/guides/a.md" in done.stdout


def test_a_page_without_a_source_or_with_a_broken_link_fails(small: Path) -> None:
    page = small / "docs/zh/guides/a.md"
    page.write_text(page.read_text() + "[b](b.md)\n")
    done = run_check(small)
    assert done.returncode == 1
    assert "the link b.md leads nowhere" in done.stdout
    page.write_text(page.read_text().replace("[b](b.md)\n", ""))
    (small / "docs/guides/a.md").rename(small / "docs/guides/b.md")
    done = run_check(small)
    assert done.returncode == 1
    assert "its source docs/guides/a.md does not exist" in done.stdout


def test_the_guide_lists_every_code_with_chinese_texts() -> None:
    listed = re.findall(r"\b[A-Z]\d{3}\b", (ROOT / "docs" / "guides" / "language.md").read_text())
    chinese = {
        code
        for file in MESSAGES.glob("?.yaml")
        for code, named in messages(file.stem).items()
        if any(texts.zh_what for texts in named.values())
    }
    assert chinese <= set(listed)
