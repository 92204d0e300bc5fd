"""The layout of a report: no text covers another at any size, counted in Python and measured in a real browser."""

import html
import itertools
import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.cases import quick_or_slow
from tests.runs import PREDICTION, finished_run, new_run, start_ranks, step_metrics
from tests.unit.test_app_report import hostile_run, long_run
from trimaran.core import Mesh, Plan, parse_recipe
from trimaran.runs import AttemptLog, IncidentLog, Journal, RunDirectory, append_line, create_run
from trimaran.ui import (
    LABEL_GAP,
    MAX_LABEL,
    FigureAxis,
    Lines,
    ValueSeries,
    end_labels,
    facts_of,
    page_of,
    rank_layout,
    split_verdict,
    spread_apart,
)

BROWSER = shutil.which("chromium")
WIDTHS = {"phone": 390, "laptop": 1366, "wide": 2560}
PHONE_PLOT_PIXELS = 150  # the height of the lowest plot
CHARACTER_PIXELS = 7.5  # of a broad font at 12 pixels
LONG = "a-very-long-name-without-any-break-" + 28 * "x"


def one_step(path: Path) -> RunDirectory:
    run = new_run(path, steps=1)
    start_ranks(run)
    with Journal(run, 0) as journal:
        journal.step(step_metrics(1, loss=2.5))
    return run


def resumed(path: Path) -> RunDirectory:
    """Return a run with a restart, incidents, checkpoints, machines, memory, and a NaN loss."""
    run = new_run(path, steps=40)
    attempts, now = AttemptLog(run), time.time()
    attempts.begin(world_size=2)
    start_ranks(run)
    with Journal(run, 0) as journal:
        for step in range(1, 41):
            memory = {"allocated": (100 + step) << 20, "reserved": (120 + step) << 20, "total": 1 << 34}
            loss = math.nan if step == 20 else 9.0 / step
            metrics = step_metrics(step, loss=loss, seconds=40.0 if step == 21 else 0.5)
            journal.step(replace(metrics, time=now + step, details={"memory": memory}))
            if step % 10 == 0:
                journal.event("evaluation", step=step, loss=9.5 / step, tokens=1024)
                journal.event("checkpoint", step=step, stall_seconds=0.2)
    log = IncidentLog(run)
    message = 'RuntimeError: size mismatch\n  File "model.py", line 12, in forward\n    return self.layer(x) @ weight'
    found = log.notice("crash", message, evidence={"facts": ["exit code 1"], "why": "again"}, step=20)
    log.amend(found, action="restarted")
    attempts.end("trouble", step=20)
    attempts.begin(world_size=2)
    for second in range(40):
        gpu = {"utilisation": 0.5, "power": 400.0, "temperature": 60.0, "memory_used": 1, "memory": 4}
        append_line(run.samples(0), {"time": now + second, "cpu": 0.5, "ram": 4, "ram_used": 1, "gpus": [gpu]})
    return run


def many_ranks(path: Path) -> RunDirectory:
    mesh = Mesh(dp_replicate=4, dp_shard=8, tp=16, pp=12)
    recipe = parse_recipe(f"name: {LONG}", name="test", overrides=["train.steps=10"])
    run = create_run(path, recipe, Plan(mesh=mesh, micro_batch=2, grad_accum=24, prediction=PREDICTION))
    with Journal(run, 0) as journal:
        for step in range(1, 11):
            journal.step(step_metrics(step, loss=1e-7 * step))
    return run


def perception(path: Path) -> RunDirectory:
    recipe = parse_recipe(
        "{name: cars, model: {family: perception}, data: {source: scenes}}", name="test", overrides=[]
    )
    run = create_run(path, recipe, Plan(mesh=Mesh(dp_replicate=2), prediction=PREDICTION))
    with Journal(run, 0) as journal:
        for step in range(1, 11):
            journal.step(step_metrics(step, loss=1e9 / step))
        journal.event("evaluation", step=10, loss=0.5, tokens=1, accuracy={"detection": 0.5, "road": 0.875},
                      accuracy_counts={"road": 1200})  # fmt: skip
    return run


RUNS: dict[str, Callable[[Path], RunDirectory]] = {
    "new": new_run, "one step": one_step, "ten steps": finished_run, "resumed": resumed, "hostile": hostile_run,
    "many ranks": many_ranks, "perception": perception, "long": lambda path: long_run(path, 3000),
}  # fmt: skip


class Figures(HTMLParser):
    """The plots of a page: the classes of their parts in order, the texts of the labels, and the end labels."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.figures: list[dict[str, list[str]]] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        fields = dict(attrs)
        if tag == "figure" and ("data-plot" not in fields or fields.get("class") == "view"):
            self._open.append("another figure")
            return
        if tag == "figure":
            self.figures.append({"parts": [], "y-labels": [], "x-labels": [], "ends": [], "tops": []})
        if self.figures and self._open[-1:] == ["figure"]:
            self.figures[-1]["parts"].append(fields.get("class") or tag)
        if tag == "text" and "figure" in self._open:
            self.figures[-1]["tops"].append(str(fields["y"]).rstrip("%"))
        if tag != "meta":
            self._open.append("figure" if tag == "figure" else str(fields.get("class") or tag))

    def handle_endtag(self, tag: str) -> None:
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for name in ("y-labels", "x-labels"):
            if name in self._open[-2:] and "figure" in self._open:
                self.figures[-1][name].append(data)
        if self._open[-1:] == ["text"] and "figure" in self._open:
            self.figures[-1]["ends"].append(data)


@pytest.mark.parametrize("kind", quick_or_slow(RUNS, lambda kind: kind in ("resumed", "many ranks", "long")))
def test_the_texts_of_a_plot_have_places_of_their_own(tmp_path: Path, kind: str) -> None:
    found = Figures(page_of(facts_of(RUNS[kind](tmp_path / "run")))).figures
    assert bool(found) == (kind != "new")
    for figure in found:
        parts = [part for part in figure["parts"] if part not in ("legend", "stats")]
        assert parts == ["figcaption", "frame", "output"]  # blocks, one below the other
        tops = [float(top) / 100 for top in figure["tops"]]
        assert tops == sorted(tops)
        assert all(0 <= top <= 1 for top in tops)
        assert all(PHONE_PLOT_PIXELS * (after - before) > 16 for before, after in itertools.pairwise(tops))
        assert all(len(text) <= MAX_LABEL for text in figure["ends"])
        beside = max(map(len, figure["y-labels"])) * CHARACTER_PIXELS + (116 if figure["ends"] else 0)
        below = sum(map(len, figure["x-labels"])) * CHARACTER_PIXELS + 8 * len(figure["x-labels"])
        assert beside + below < WIDTHS["phone"] - 28 - 12, figure


@pytest.mark.parametrize("tops", [[0.5] * 5, [0.0, 0.01, 0.99, 1.0], [1.0, 1.0, 1.0], [0.2], [], [0.4] * 20])
def test_end_labels_are_moved_apart(tops: list[float]) -> None:
    moved = spread_apart(tops, gap=LABEL_GAP)
    gap = min(LABEL_GAP, 1 / max(1, len(tops) - 1))
    assert all(after - before > gap - 1e-9 for before, after in itertools.pairwise(moved))
    assert all(-1e-9 <= top <= 1 for top in moved)
    if len(tops) == 1:
        assert moved == tops


def test_lines_have_names_at_their_ends_and_a_single_line_its_value() -> None:
    axis = FigureAxis(0.0, 10.0)
    series = [
        ValueSeries(name=name, color="blue", at=[1.0, 2.0], values=[9.0, value])
        for name, value in (("a", 5.0), ("b", 5.2))
    ]
    both = end_labels(Lines(title="", unit="number", series=series, limits={"predicted": 10.0}), axis)
    assert [each.text for each in both] == ["predicted", "b", "a"]
    (alone,) = end_labels(Lines(title="", unit="number", series=series[:1]), axis)
    assert (alone.text, alone.top) == ("5", 0.5)


def test_only_the_statement_of_a_finding_is_bold() -> None:
    verdict = 'rank 1 crashed: ValueError: bad\n  File "x.py", line 3, in forward\n    return weight @ x'
    title, detail = split_verdict(verdict)
    assert title == "Rank 1 crashed"
    assert detail == 'ValueError: bad\n  File "x.py", line 3, in forward\n    return weight @ x'
    assert split_verdict("all is slow") == ("All is slow", "")
    assert len(split_verdict("x" * 5000)[0]) < 200


def test_an_accuracy_says_of_how_many_it_is(tmp_path: Path) -> None:
    text = page_of(facts_of(perception(tmp_path / "run")))
    assert ("87.5% / 1,200<" in text, "50.0%<" in text) == (True, True)


def test_source_lines_of_an_incident_are_not_in_a_heading(tmp_path: Path) -> None:
    text = page_of(facts_of(resumed(tmp_path / "run")))
    headings = re.findall(r"<(h[123]|b)[ >].*?</\1>", text, re.DOTALL)
    assert headings
    assert "return self.layer(x)" in text
    bold = "".join(match.group(0) for match in re.finditer(r"<(h[123]|b)(?: [^>]*)?>.*?</\1>", text, re.DOTALL))
    assert "self.layer" not in bold
    assert "model.py" not in bold


def test_every_rank_of_a_small_mesh_is_shown_once_and_a_large_one_is_abridged(tmp_path: Path) -> None:
    facts = {
        "plan": {
            "mesh": Mesh(dp_shard=2, tp=2, pp=2).model_dump(),
            "pipeline": {"stages": [3, 5]},
            "sharding": "parameters",
        }
    }
    text = rank_layout(facts)
    assert sorted(re.findall(r'class="rank \w+">(\d+)<', text), key=int) == [str(rank) for rank in range(8)]
    assert "stage 1, 5 layers" in text
    rows = re.findall(r"<tr>.*?</tr>", text)
    assert re.findall(r">(\d)<", rows[1]) == ["0", "1", "4", "5"]  # tp is innermost, pp outermost
    large = rank_layout(facts_of(many_ranks(tmp_path / "run")))
    assert "25 more" in large
    assert ">6143<" in large  # the last rank
    assert len(large) < 40_000


# Overlaps of text boxes, and text that leaves the page: of each text node, the box of every line.
COLLECT = """
<script>
onload = () => {
  for (const each of document.querySelectorAll("details")) each.open = true;
  for (const area of document.querySelectorAll(".plot-area")) {
    const box = area.getBoundingClientRect();
    area.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right - 2, clientY: box.top + 5}));
  }
  const boxes = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), wrong = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.data.trim() || parent.closest("script, style, title")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const scrolls = parent.closest(".scroll") !== null;
    for (const box of range.getClientRects())
      if (box.width > 1 && box.height > 1) boxes.push({node, scrolls, box, text: node.data.trim().slice(0, 40)});
  }
  const right = document.documentElement.clientWidth;
  for (const {box, text, scrolls} of boxes)
    if (!scrolls && (box.right > right + 1 || box.left < -1)) wrong.push("leaves the page: " + text);
  boxes.sort((one, other) => one.box.top - other.box.top);
  boxes.forEach((one, index) => {
    for (let at = index + 1; at < boxes.length && boxes[at].box.top < one.box.bottom - 2; at++) {
      const other = boxes[at], left = Math.max(one.box.left, other.box.left);
      const width = Math.min(one.box.right, other.box.right) - left;
      const height = Math.min(one.box.bottom, other.box.bottom) - other.box.top;
      if (one.node === other.node || width <= 2 || height <= 3) continue;
      wrong.push("'" + one.text + "' covers '" + other.text + "'");
    }
  });
  parent.postMessage(JSON.stringify({width: innerWidth, boxes: boxes.length, wrong}), "*");
};
</script></body>"""
FRAMES = """<!doctype html><title>frames</title><pre id="out"></pre>
<script>onmessage = (event) => { document.getElementById("out").append(event.data + "\\n"); };</script>"""


def measure_pages(pages: dict[str, str], folder: Path) -> list[dict]:
    """Return what a browser finds in each page at each width. A frame is as wide as a phone; a window cannot be."""
    frames = []
    for index, text in enumerate(pages.values()):
        bare = re.sub("<meta http-equiv=[^>]*>", "", text)  # the page's policy would refuse the script that measures
        (folder / f"page-{index}.html").write_text(bare.replace("</body>", COLLECT))
        frames += [
            f'<iframe src="page-{index}.html" width="{width}" height="900"></iframe>' for width in WIDTHS.values()
        ]
    (folder / "frames.html").write_text(FRAMES + "".join(frames))
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
               "--disable-background-networking", "--disable-component-update", "--disable-sync", "--dump-dom",
               "--virtual-time-budget=20000", f"--user-data-dir={folder / 'profile'}"]  # fmt: skip
    uri = (folder / "frames.html").as_uri()
    done = subprocess.run([*command, uri], capture_output=True, text=True, timeout=120, check=True)
    out = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.DOTALL)
    assert out, done.stdout[:500]
    return [json.loads(html.unescape(line)) for line in out[1].splitlines() if line]


@pytest.mark.skipif(not BROWSER, reason="needs chromium")
def test_in_a_browser_no_text_covers_another_and_none_leaves_the_page(tmp_path: Path) -> None:
    pages = {
        kind: page_of(facts_of(build(tmp_path / f"run {index}"))) for index, (kind, build) in enumerate(RUNS.items())
    }
    found = measure_pages(pages, tmp_path)
    assert len(found) == len(pages) * len(WIDTHS)
    assert all(each["boxes"] > 10 for each in found)
    assert [(each["width"], *each["wrong"]) for each in found if each["wrong"]] == []


@pytest.mark.skipif(not BROWSER, reason="needs chromium")
def test_the_measurement_notices_text_that_covers_another(tmp_path: Path) -> None:
    page = page_of(facts_of(finished_run(tmp_path / "run"))).replace(
        ".frame {", ".frame { position: relative; top: -30px;"
    )
    assert any("covers" in line for each in measure_pages({"bad": page}, tmp_path) for line in each["wrong"])
