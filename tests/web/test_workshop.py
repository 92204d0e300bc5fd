"""The workshop in a real browser: every control is moved, and the answer follows."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.web.conftest import OpenPage, opening, serving, wait_until
from trimaran.app import RunState
from trimaran.runs import RunDirectory

END_SECONDS = 240
MOVED = {"Nodes": 2, "Devices of a node": 2, "Tokens of a sequence": 3, "Sequences of a step": 5, "Steps of the run": 1}


def read_status(run: Path) -> str:
    state = RunState(RunDirectory(run), only_status=True)
    state.refresh()
    return state.status


def wait_for_command(page: Any, words: str) -> None:
    """Wait until the answer is that of a command with these words."""
    wait_until(
        page,
        "(words) => [...document.querySelectorAll('.answer pre.command')].some((each) => each.textContent"
        ".includes(words)) && !document.querySelector('.stale')",
        words,
    )


def test_every_control_changes_the_answer(open_page: OpenPage) -> None:
    page = open_page("/workshop")
    wait_for_command(page, "trimaran plan llama-3.1-8b --cluster 2x8xH100")
    page.get_by_label("Model or recipe", exact=True).select_option("llama-3.2-1b")
    wait_for_command(page, "trimaran plan llama-3.2-1b")
    for label, at in MOVED.items():
        slider = page.get_by_label(label, exact=True)
        slider.fill(str(at))
    wait_for_command(page, "--cluster 4x4xH100 --seq-len 2048 --global-batch 32 --top 12 --set train.steps=30")
    page.get_by_label("Device", exact=True).select_option("A100-80GB")
    wait_for_command(page, "--cluster 4x4xA100-80GB")
    page.get_by_label("Goal", exact=True).select_option("memory")
    wait_for_command(page, "--goal memory")
    page.get_by_label("Adapter", exact=True).select_option("lora")
    wait_for_command(page, "--adapter lora")
    page.get_by_label("mesh.tp", exact=True).select_option("2")
    wait_for_command(page, "--set plan.mesh.tp=2")
    assert "tp 2" in page.locator(".answer .lead").inner_text()
    page.get_by_role("button", name="Release all pins").click()
    wait_until(page, "() => !document.querySelector('.answer').textContent.includes('plan.mesh.tp')")
    wait_until(page, "() => document.querySelector('[aria-label=\"mesh.tp\"]').value === ''")


def test_a_plan_says_why_it_lost_and_can_be_pinned(open_page: OpenPage) -> None:
    page = open_page("/workshop")
    wait_for_command(page, "trimaran plan llama-3.1-8b")
    row = page.locator(".plans tbody tr").nth(1)
    row.locator("summary").click()
    assert row.locator("details p").inner_text()
    row.get_by_role("button", name="Pin").click()
    wait_for_command(page, "plan.mesh.tp=")
    assert page.get_by_label("mesh.pp", exact=True).input_value() != ""


def test_texts_to_run_the_plan_are_shown_and_copied(open_page: OpenPage) -> None:
    page = open_page("/workshop")
    wait_for_command(page, "trimaran plan")
    text = page.locator(".texts pre.command").first
    for name, beginning in (("sbatch", "#!/bin/bash"), ("Kubernetes manifest", "apiVersion:"), ("Command", "torchrun"),
                            ("Recipe", "# Written by")):  # fmt: skip
        page.get_by_role("button", name=name, exact=True).click()
        text.filter(has_text=beginning).wait_for()
    page.locator(".texts .copied button").first.click()
    page.locator(".texts").get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").startswith("# Written by the workshop")
    assert page.get_by_role("button", name="Start the run here").is_disabled()


def test_an_answer_that_is_an_error_says_what_to_do(open_page: OpenPage) -> None:
    page = open_page("/workshop", language="zh")
    page.get_by_label("模型或配方", exact=True).select_option("llama-3.1-70b")
    page.get_by_label("节点数", exact=True).fill("0")
    page.get_by_label("每个节点的设备数", exact=True).fill("0")
    page.locator(".card.fault").wait_for()
    page.locator(".texts").wait_for(state="hidden")
    page.get_by_label("模型或配方", exact=True).select_option("llama-3.2-1b")
    page.locator(".answer .tiles").wait_for()
    page.locator(".texts").wait_for()


@pytest.mark.slow
def test_a_page_that_may_write_starts_a_real_run(browser: Any, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    with serving(runs, tmp_path, "--write") as server:
        context = browser.new_context()
        page = context.new_page()
        page.goto(server.url)
        page.wait_for_selector(".page h1")
        with opening(browser, server, context.storage_state()) as open_one:
            page = open_one("/workshop")
            page.get_by_label("Model or recipe", exact=True).select_option("tiny")
            wait_for_command(page, "plan tiny")  # the model has set the sizes
            page.get_by_label("Device", exact=True).select_option("cpu")
            page.get_by_label("Nodes", exact=True).fill("0")
            page.get_by_label("Devices of a node", exact=True).fill("0")
            page.get_by_label("Tokens of a sequence", exact=True).fill("0")
            page.get_by_label("Sequences of a step", exact=True).fill("2")
            page.get_by_label("Steps of the run", exact=True).fill("0")
            wait_for_command(page, "--cluster 1xcpu --seq-len 256 --global-batch 4 --top 12 --set train.steps=10")
            page.get_by_role("button", name="Start the run here").click()
            page.locator("a[href='/runs/tiny']").wait_for()
        context.close()
    run = runs / "tiny"
    deadline = time.monotonic() + END_SECONDS
    while read_status(run) != "done" and time.monotonic() < deadline:
        time.sleep(0.5)
    assert read_status(run) == "done"  # although the server has ended
    assert json.loads((run / "plan.json").read_text())["plan"]["mesh"]["tp"] == 1
