"""The views in a real browser: every view in every mode of a real run, every control, both languages, all widths."""

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cases import slow
from tests.unit.test_viz_texts import CHINESE
from tests.web.conftest import OpenPage, trimaran, user_environment
from trimaran.runs import RunDirectory
from trimaran.ui import SHORT_NAMES, PlanView, build_view, read_subject, show_value, translate_view

WAIT_SECONDS = 60.0  # on a busy machine
MODES = ("explain", "simulate", "live")
# A CPU has the memory that is free in this moment. Formulas, which do not depend on it, are compared whole.
SIZE = re.compile(r"[\d.,]+ (?:[KMGT]i)?B")
FITS = "() => document.documentElement.scrollWidth <= innerWidth"
NEW_MARKUP = "before => document.querySelector('#answer').innerHTML !== before"
# Of these views all controls are moved in every run of the tests; of the others in the slow ones.
QUICK = ("collectives", "zero", "life")


@pytest.fixture(autouse=True)
def caches_of_the_server(web_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the calibration of this machine that the server uses: the trainer has measured it for the run."""
    for name in ("TRIMARAN_CACHE", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, user_environment(web_folder)[name])


def until(page: Any, expression: str, arg: Any = None) -> None:
    """Wait until the function of JavaScript returns true. Playwright's own waiting needs eval, which pages refuse."""
    end = time.monotonic() + WAIT_SECONDS
    while not page.evaluate(expression, arg):
        assert time.monotonic() < end, (
            f"{expression} stays false, and the page shows {page.text_content('main')[:2000]}"
        )
        page.wait_for_timeout(50)


def open_view(open_page: OpenPage, name: str, run: RunDirectory, **options: Any) -> Any:
    page = open_page(f"/views/{name}?run={run.path.name}", **options)
    until(page, "() => document.querySelector('#answer')?.textContent.length > 0")
    return page


def text_of(page: Any) -> str:
    """Return the text of the answer, with plain spaces."""
    return " ".join(page.text_content("#answer").replace("\u00a0", " ").split())


def choose_mode(page: Any, mode: str) -> None:
    if page.get_attribute(f"#mode-{mode}", "aria-pressed") == "true":
        return
    before = page.inner_html("#answer")
    page.click(f"#mode-{mode}")
    until(page, NEW_MARKUP, before)


def expect(page: Any, view: PlanView, mode: str) -> None:
    """Check that the page shows the sentences, the numbers and the titles of the view, and fits its window."""
    shown, expected = text_of(page), view.modes[mode]  # type: ignore[index]
    for sentence in expected.sentences:
        assert SIZE.sub("SIZE", " ".join(sentence.split())) in SIZE.sub("SIZE", shown)
    for formula in expected.formulas:
        assert show_value(formula.value, formula.unit) in shown
    for figure in expected.figures:
        assert " ".join(figure.title.split()) in shown
    assert len(page.query_selector_all("#answer figure")) == len(expected.figures)
    assert page.evaluate(FITS), f"{view.name} {mode} is wider than its window"


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_every_mode_of_a_run_shows_the_numbers_of_the_command(
    name: str, open_page: OpenPage, real_run: RunDirectory
) -> None:
    view = build_view(name, read_subject(None, str(real_run.path), None, (), ()))
    page = open_view(open_page, name, real_run, width=1440)
    for mode in MODES:
        choose_mode(page, mode)
        page.set_viewport_size({"width": 1440, "height": 900})
        expect(page, view, mode)
        page.set_viewport_size({"width": 360, "height": 800})
        assert page.evaluate(FITS), f"{name} {mode} is wider than a phone"
    assert page.text_content(".same-command pre") == f"trimaran viz {name} --run {real_run.path}"


def move(page: Any, index: int) -> str:
    """Move a control of the panel to another value and return its name, once the page has answered."""
    control = page.query_selector_all("#controls .control")[index]
    before = page.text_content(".same-command pre")
    if field := control.query_selector("select"):
        options = [each.get_attribute("value") for each in field.query_selector_all("option")]
        now = field.evaluate("each => each.value")
        others = [each for each in options if each != now]
        if not others:
            return ""
        field.select_option(others[-1])
    else:
        field = control.query_selector("input")
        field.evaluate("""each => {
            const middle = Math.round((Number(each.min) + Number(each.max)) / 2);
            each.value = each.value === String(middle) ? middle + 1 : middle;
            each.dispatchEvent(new Event("input", { bubbles: true }));
        }""")
    until(page, "before => document.querySelector('.same-command pre').textContent !== before", before)
    return page.text_content(".same-command pre")


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in SHORT_NAMES])
def test_every_control_changes_the_view_and_its_command(name: str, open_page: OpenPage, real_run: RunDirectory) -> None:
    view = build_view(name, read_subject(None, str(real_run.path), None, (), ()))
    page = open_view(open_page, name, real_run)
    choose_mode(page, "explain")
    for index, control in enumerate(view.controls):
        command = move(page, index)
        if not command:  # a list with a single option
            assert len(control.options) == 1
            continue
        assert f"--with {control.name}=" in command
    assert "trimaran viz" in page.text_content(".same-command pre")


def test_a_moved_control_shows_what_the_command_answers(
    open_page: OpenPage, real_run: RunDirectory, web_folder: Any
) -> None:
    page = open_view(open_page, "zero", real_run)
    choose_mode(page, "explain")
    command = move(page, 0)
    words = command.split()[1:]
    done = trimaran(web_folder, *words, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    first = answer["modes"]["explain"]["formulas"][0]["numbers"]
    until(page, "text => document.querySelector('#answer').textContent.includes(text)", first)
    shown = text_of(page)
    for formula in answer["modes"]["explain"]["formulas"]:
        assert formula["numbers"] in shown
        assert show_value(formula["value"], formula["unit"]) in shown


@pytest.mark.parametrize("name", [name if name == "mesh" else slow(name) for name in SHORT_NAMES])
def test_views_speak_chinese(name: str, open_page: OpenPage, real_run: RunDirectory) -> None:
    view = translate_view(build_view(name, read_subject(None, str(real_run.path), None, (), ())), CHINESE.get)
    page = open_view(open_page, name, real_run, language="zh", scheme="dark")
    assert page.text_content("main h1") == view.title
    for mode in MODES:
        choose_mode(page, mode)
        expect(page, view, mode)


def test_the_gallery_leads_to_all_views(open_page: OpenPage) -> None:
    for width, language in ((1440, "en"), (360, "zh")):
        page = open_page("/views", width=width, language=language)
        cards = page.query_selector_all(".view-card")
        assert [each.get_attribute("href") for each in cards] == [f"/views/{name}" for name in SHORT_NAMES]
        assert page.evaluate(FITS)
    page.click("#view-need")
    page.wait_for_selector("#answer figure")


def test_a_plan_can_be_chosen_and_mistakes_are_shown(open_page: OpenPage) -> None:
    page = open_page("/views/need?plan=llama-3.2-1b&cluster=8xH100")
    page.wait_for_selector("#answer figure")
    assert "llama-3.2-1b" in page.text_content("#about")
    assert page.text_content(".same-command pre") == "trimaran viz need --plan llama-3.2-1b --cluster 8xH100"
    page.click("#mode-live")
    page.wait_for_selector("#answer .empty")
    for query in ("plan=../../etc/passwd", "cluster=../x.yaml", "plan=nothing-of-that-name"):
        page = open_page(f"/views/need?{query}")
        page.wait_for_selector(".card.fault")
        assert "V005" in page.text_content(".card.fault")


def test_the_view_of_a_run_follows_its_files(open_page: OpenPage, real_run: RunDirectory, web_folder: Any) -> None:
    copied = RunDirectory(shutil.copytree(real_run.path, real_run.path.with_name("growing")))
    try:
        page = open_view(open_page, "need", copied)
        line = json.loads(copied.metrics.read_text().splitlines()[-1])
        assert f"After {line['step']:,} steps" in text_of(page)
        with copied.metrics.open("a") as file:
            file.write(json.dumps(line | {"step": 4321, "peak_bytes": 1 << 40, "time": line["time"] + 1}) + "\n")
        until(page, "() => document.querySelector('#answer').textContent.includes('After 4,321 steps')")
    finally:
        shutil.rmtree(copied.path)
