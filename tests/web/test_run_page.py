"""The page of a run and the comparison in a real browser: finished, live, with a killed rank, with decisions."""

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fault.harness import Supervised
from tests.unit.test_app_decisions import ADVISED, KEPT
from tests.web.conftest import OpenPage, WebServer, wait_until
from trimaran.autopilot import DecisionLedger
from trimaran.runs import RunDirectory
from trimaran.ui import facts_of

TABS = ("overview", "training", "ranks", "time", "incidents", "checkpoints", "autopilot", "plan", "machines", "samples",
        "commands")  # fmt: skip
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def until(page: Any, expression: str) -> None:
    """Return when an expression is true in the page."""
    wait_until(page, f"() => Boolean({expression})")


def ready(page: Any) -> None:
    """Return when the content of the tab is there and nothing of it is still read."""
    until(
        page,
        "document.querySelector('.run-tabs [aria-selected=true]') && document.querySelector('.run-body > *')"
        " && !document.querySelector('.loading')",
    )


def show(page: Any, tab: str) -> None:
    """Open a tab as a user does, and wait for its content."""
    page.locator(f'a[data-tab="{tab}"]').click()
    page.wait_for_selector(f'a[data-tab="{tab}"][aria-selected=true]')
    ready(page)


def point_until(page: Any, condition: str) -> None:
    """Move the pointer inside the first cell until the condition holds: an update may replace the grid at any time."""
    for number in range(200):
        page.locator(".rank-grid").first.hover(position={"x": 7 + number % 3, "y": 8})
        if page.evaluate(f"() => Boolean({condition})"):
            return
        time.sleep(0.1)
    raise AssertionError(condition)


def decided(real: RunDirectory, name: str) -> RunDirectory:
    """Return a copy of a run whose autopilot has kept one decision and advised another."""
    path = real.path.parent / name
    shutil.copytree(real.path, path)
    (path / "decisions.jsonl").unlink(missing_ok=True)
    run = RunDirectory(path)
    ledger = DecisionLedger(run)
    for each in (KEPT, ADVISED):
        ledger.write(each)
    return run


@pytest.fixture(scope="module")
def supervised(web_server: WebServer) -> Iterator[Supervised]:
    """A run that trains while the test looks at it."""
    settings = ("train.steps=100000", "train.save=false", "telemetry.sample_seconds=1", "checkpoint.every=50")
    with Supervised.start(web_server.runs / "live-run", *settings, pause=0.05) as found:
        found.wait_for_step(3, seconds=180)
        yield found


@pytest.mark.parametrize("width", [360, 1440])
def test_every_tab_of_a_finished_run_is_drawn_and_fits(open_page: OpenPage, real_run: RunDirectory, width: int) -> None:
    page = open_page(f"/runs/{real_run.path.name}", width=width, scheme="dark" if width == 360 else "light")
    facts = facts_of(real_run)
    ready(page)
    assert page.locator(".run-head .badge").inner_text() == "done"
    for tab in TABS:
        show(page, tab)
        assert page.locator(".run-body").inner_text().strip()
        assert page.evaluate(OVERFLOW) <= 0, tab
    assert page.url.endswith("tab=commands")
    commands = page.locator(".run-body pre.command").all_inner_texts()
    assert [each["command"] for each in facts["commands"]] == commands[: len(facts["commands"])]
    show(page, "training")
    assert page.locator(".run-body figure[data-plot]").count() == 6
    show(page, "checkpoints")
    assert page.locator(".run-body tbody tr").count() == len(facts["checkpoints"])
    show(page, "samples")
    assert page.locator(".run-body article").count() == len(facts["samples"])
    page.reload()  # the address names the tab
    page.wait_for_selector('a[data-tab="samples"][aria-selected=true]')


def test_dragging_over_a_plot_shows_a_range_of_steps(open_page: OpenPage, real_run: RunDirectory) -> None:
    page = open_page(f"/runs/{real_run.path.name}?tab=training")
    ready(page)
    steps = facts_of(real_run)["steps"]
    labels = page.locator(".run-body figure .x-labels").first
    assert labels.inner_text().split()[-1] == str(steps)
    area = page.locator(".run-body figure .plot-area").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 50)
    until(page, "document.querySelector('figure.active output')?.textContent.includes('loss')")
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 60, steps=4)
    page.mouse.up()
    until(page, f"!document.querySelector('.run-body .x-labels')?.textContent.includes('{steps}')")
    page.get_by_role("button", name="The whole run").click()
    until(page, f"document.querySelector('.run-body .x-labels')?.textContent.includes('{steps}')")
    page.get_by_label("From step").fill("2")
    page.get_by_label("To step").fill("5")
    until(page, "document.querySelector('.run-body .x-labels')?.textContent.startsWith('step 2')")


def test_the_keyboard_opens_tabs_and_the_language_is_chinese(open_page: OpenPage, real_run: RunDirectory) -> None:
    page = open_page(f"/runs/{real_run.path.name}", language="zh")
    ready(page)
    assert page.locator('a[data-tab="checkpoints"]').inner_text().startswith("检查点")
    page.locator('a[data-tab="overview"]').focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector('a[data-tab="training"][aria-selected=true]')
    assert "损失" in page.locator(".run-body").inner_text()


def test_a_run_is_drawn_while_it_trains_and_a_killed_rank_is_an_incident(
    open_page: OpenPage, supervised: Supervised
) -> None:
    page = open_page("/runs/live-run")
    ready(page)
    page.wait_for_selector(".banner progress")
    before = int(page.locator(".banner progress").get_attribute("value"))
    until(page, f"Number(document.querySelector('.banner progress')?.value) > {before}")
    show(page, "ranks")
    until(page, "document.querySelector('figure.rank-grids')?.dataset.cells.includes('heartbeat')")
    until(page, "document.querySelector('.rank-grids')?.innerText.includes('Lag')")  # after a few steps
    point_until(page, "document.querySelector('.rank-grids output')?.textContent.startsWith('rank 0')")
    show(page, "incidents")
    assert page.locator(".run-body .empty").count() == 1
    supervised.send_signal(1, signal.SIGKILL)
    incident = supervised.wait_for_fault(0, seconds=180)
    page.wait_for_selector(".run-body article.card")
    card = page.locator(".run-body article.card").last.inner_text()
    assert incident.what in card
    assert "rank 1" in card
    show(page, "time")
    until(page, "document.querySelector('.waterfall')?.innerText.includes('restart')")
    supervised.process.send_signal(signal.SIGINT)
    supervised.wait(seconds=180)
    until(page, "document.querySelector('.run-head .badge').textContent === 'stopped'")
    assert "trimaran resume" in page.locator(".banner pre.command").inner_text()


def test_decisions_are_shown_with_before_and_after(open_page: OpenPage, real_run: RunDirectory) -> None:
    decided(real_run, "decided-run")
    page = open_page("/runs/decided-run?tab=autopilot", width=360)
    ready(page)
    cards = page.locator(".run-body article.card")
    assert cards.count() == 2
    kept = cards.nth(1).inner_text()
    for text in (
        "micro_batch",
        "kept: steps became shorter",
        "500 ms",
        "440 ms",
        "410 ms",
        "+12.0%",
        "+18.0%",
        "--set plan.micro_batch=1",  # a finished run is trained again without the change
    ):
        assert text in kept, text
    cards.nth(1).locator(".copied button").click()
    page.get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").endswith("--set plan.micro_batch=1 --set plan.grad_accum=8")
    assert page.evaluate(OVERFLOW) <= 0


@pytest.mark.parametrize("width", [360, 1440])
def test_runs_are_compared(open_page: OpenPage, real_run: RunDirectory, width: int) -> None:
    if not (real_run.path.parent / "second-run").exists():
        decided(real_run, "second-run")
    page = open_page("/compare", width=width)
    for name in (real_run.path.name, "second-run"):
        page.get_by_role("button", name=name, exact=True).click()
    page.locator("a.button-link").click()
    page.wait_for_selector(".run-body figure[data-plot]")
    for axis in ("by tokens", "by time in steps", "by step"):
        page.get_by_role("button", name=axis, exact=True).click()
        page.wait_for_selector(f'button[aria-pressed=true]:text-is("{axis}")')
        assert page.evaluate(OVERFLOW) <= 0
    text = page.locator(".run-body").inner_text()
    assert "The recipes are the same." in text
    assert f"trimaran report {real_run.path} {Path(real_run.path.parent, 'second-run')} --json" in text


def test_a_comparison_of_one_run_says_what_is_wrong(open_page: OpenPage, real_run: RunDirectory) -> None:
    page = open_page(f"/compare?runs={real_run.path.name}")
    page.wait_for_selector(".card.fault")
    assert "A042" in page.locator(".card.fault").inner_text()
