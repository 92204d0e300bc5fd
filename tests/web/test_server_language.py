"""`TRIMARAN_LANG=zh trimaran ui` shows Chinese pages and errors to a browser that prefers English."""

from pathlib import Path
from typing import Any

import pytest

from tests.web.conftest import WAIT_MILLISECONDS, opening, serving


def test_the_variable_sets_the_language_of_pages_and_errors(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMARAN_LANG", "zh")
    runs = tmp_path / "runs"
    runs.mkdir()
    with serving(runs, tmp_path) as server:
        context = browser.new_context(locale="en-GB")
        page = context.new_page()
        page.goto(server.url)
        page.wait_for_selector(".page h1", timeout=WAIT_MILLISECONDS)
        state = context.storage_state()
        context.close()
        with opening(browser, server, state) as open_page:
            page = open_page("/")
            assert page.evaluate("document.documentElement.lang") == "zh"
            assert page.inner_text("nav a[aria-current]") == "训练任务"
        context = browser.new_context(locale="en-GB", storage_state=state)  # the browser reports the 404 as an error
        page = context.new_page()
        page.goto(f"{server.base}/runs/no-such-run")
        page.wait_for_selector(".card.fault", timeout=WAIT_MILLISECONDS)
        shown = page.inner_text(".card.fault")
        assert "没有训练 'no-such-run'" in shown
        assert "从列表中选择一个训练" in shown
        context.close()
