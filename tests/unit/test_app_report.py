"""The report of a run: one self-contained page, where nothing that a run wrote is markup."""

import html
import json
import math
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.parity import plan_for
from tests.ranks import run_ranks
from tests.runs import finished_run, new_run, start_ranks, step_metrics
from trimaran.app import main
from trimaran.core import Recipe
from trimaran.runs import AttemptLog, IncidentLog, Journal, RunDirectory, append_line, create_run, dump_plan
from trimaran.train import read_rank_info, run_worker
from trimaran.ui import MAX_POINTS, Html, curve, even_axis, even_labels, facts_of, page_of, spread, tag

SECONDS = 6.0  # of a core: 2.8 were measured, and 4.3 with thirty other processes on two cores
BROWSER = shutil.which("chromium")
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b[2J"


class Page(HTMLParser):
    """A parsed page: how many scripts and images it has, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.text, self.open = "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.text += data


def page(run: RunDirectory) -> Page:
    found = Page(page_of(facts_of(run)))
    assert not found.open
    return found


def work(path: Path) -> int:
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=path.parent / "cache")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of two ranks that really trained three steps."""
    recipe = Recipe.model_validate({
        "name": "real", "cluster": "2xcpu",
        "model": {"preset": "tiny", "shape": {"layers": 1, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64}},
        "data": {"seq_len": 16},
        "train": {"steps": 3, "global_batch": 4, "sample": {"tokens": 0}, "evaluate": {"batches": 1}, "save": False},
        "checkpoint": {"every": 2, "asynchronous": False},
    })  # fmt: skip
    run = create_run(tmp_path_factory.mktemp("real") / "run", recipe, plan_for(recipe, grad_accum=1, dp_replicate=2))
    assert run_ranks(2, work, run.path) == [0, 0]
    return run


def test_a_real_run_becomes_a_page_with_all_sections(real: RunDirectory) -> None:
    facts, found = facts_of(real), page(real)
    assert [row["step"] for row in facts["checkpoints"]] == [2, 3]
    assert [step for step, _ in facts["curves"]["loss"]["points"]] == [1, 2, 3]
    for part in ("real", "done", "Loss", "Gradient norm", "Tokens per second", "Phases of a step", "Checkpoints"):
        assert part in found.text
    assert f"trimaran train {real.recipe}" in found.text
    assert "default-src 'none'" in html.unescape(page_of(facts)), "it fetches nothing"


def test_json_prints_the_same_facts(real: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(real.path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert answer.keys() == facts_of(real).keys()
    assert answer["steps"] == 3


def test_the_page_is_written_to_the_run_or_to_out(
    real: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(real.path)]) == main(["report", str(real.path)]) == 0  # also over an older page
    assert (real.path / "report.html").read_text().startswith("<!doctype html>\n")
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    assert main(["report", str(real.path), "--out", str(other)]) == 2
    assert main(["report", str(real.path), "--out", str(tmp_path / "no" / "page.html")]) == 2
    assert capsys.readouterr().err.count("A020: ") == 2
    assert other.read_text() == "mine"


def hostile_run(path: Path) -> RunDirectory:
    """Return a run whose every string is an attack."""
    run = new_run(path)
    attempts = AttemptLog(run)
    attempts.begin(world_size=2)
    with Journal(run, 0) as journal:
        fields: dict[str, Any] = {"host": HOSTILE, "device": HOSTILE, HOSTILE: HOSTILE}
        journal.event("start", **fields)
        details = {"ranks": {"busy_seconds": {"min": 1, "median": 1, "max": 3, "at": HOSTILE},
                             "outliers": [{"rank": 1, "what": HOSTILE, "value": 3.0, "median": 1.0}, HOSTILE]},
                   "groups": {HOSTILE: {"grad_norm": HOSTILE, "update_ratio": 1.0}}, "memory": HOSTILE}  # fmt: skip
        journal.step(replace(step_metrics(1, loss=2.0), details=details))
        journal.step(replace(step_metrics(2, loss=2.0), details=details))
        journal.event("error", type=HOSTILE, message=HOSTILE)
    log = IncidentLog(run)
    log.amend(log.notice("crash", HOSTILE, evidence={"facts": [HOSTILE], "why": HOSTILE}, step=1), action="stopped")
    append_line(run.samples(0), {"time": 1.0, "cpu": HOSTILE, "ram": 0, "ram_used": 1, "gpus": [HOSTILE, {"power": 5}]})
    attempts.end("trouble", step=2)
    attempts.over(1, HOSTILE)
    return run


def test_nothing_that_a_run_wrote_is_markup(tmp_path: Path) -> None:
    run = hostile_run(tmp_path / "a<b>&'c\"")
    text = page_of(facts_of(run))
    assert "<script>alert" not in text
    assert "\x1b" not in text
    found = page(run)
    assert found.tags["script"] == 1
    assert found.tags["img"] == 0
    assert "<img src=x onerror=alert(2)>" in found.text  # shown as text


def test_the_page_of_a_failed_run_shows_why(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    start_ranks(run)
    with Journal(run, 1) as journal:
        journal.event("error", type="RuntimeError", message="out of luck")
    text = page(run).text
    assert "failed" in text
    assert "rank 1: out of luck" in text


def test_a_run_without_a_step_and_a_run_of_an_older_version_have_a_page(tmp_path: Path) -> None:
    assert "There is no finished step to diagnose yet." in page(new_run(tmp_path / "new")).text
    found = page(finished_run(tmp_path / "old"))
    assert "5 → 0.5" in found.text
    assert "+10% ✓" in found.text  # peak memory, against the plan
    assert "Machines" not in found.text


def test_predicted_and_measured_are_compared_term_by_term(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    run.profiles.mkdir()
    snapshot = {"kinds": {"parameters": 44 << 20}, "within": {"kinds": {"activations": 30 << 20}}}
    (run.profiles / "memory-step-00000003-rank-0.json").write_text(json.dumps(snapshot))
    memory = {row["name"]: row["difference"] for row in facts_of(run)["comparison"]["memory"]}
    assert memory == pytest.approx({"weights": 0.1, "activations": -0.5})


def test_exposed_communication_is_compared_axis_by_axis(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    with Journal(run, 0) as journal:
        details = {"comm_seconds": {"dp_replicate": 0.1, "world": None}}
        journal.step(replace(step_metrics(11, loss=1.0), details=details))
    plan = run.read_plan()
    assert plan.prediction is not None
    prediction = plan.prediction.model_copy(update={"exposed": {"gradients on NVLink": 0.08}})
    run.plan.write_text(dump_plan(plan.model_copy(update={"prediction": prediction})))
    rows = {row["name"]: row for row in facts_of(run)["comparison"]["comm"]}
    assert rows["dp_replicate"]["difference"] == pytest.approx(0.25)
    assert rows["world"]["measured"] is None
    assert "exposed communication by axis" in page(run).text


def test_incidents_are_marked_in_the_plots(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    IncidentLog(run).notice("numeric", "the loss jumped", step=5, action="skipped")
    text = page_of(facts_of(run))
    assert text.count("<title>incident: i-0001 the loss jumped</title>") == 5  # in each plot over the steps
    assert "numeric after step 5</h3><p>the loss jumped</p>" in text


def test_samples_of_machines_are_a_band_over_all_nodes(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    for node, cpu in ((0, 0.25), (1, 0.75)):
        for second in (1000.0, 1001.0):
            gpu = {"utilisation": cpu, "power": 400.0, "temperature": 60.0, "memory_used": 1, "memory": 4}
            append_line(run.samples(node), {"time": second, "node": node, "cpu": cpu, "gpus": [gpu]})
    machines = facts_of(run)["machines_over_time"]
    assert machines["cpu"] == [[1000.0, 0.25, 0.5, 0.75], [1001.0, 0.25, 0.5, 0.75]]
    assert machines["gpu_memory"][0] == [1000.0, 0.25, 0.25, 0.25]
    assert "ram" not in machines
    assert "GPU temperature" in page(run).text


def long_run(path: Path, steps: int) -> RunDirectory:
    """Return a run of many steps, with a loss spike at step 777 and a NaN loss at step 888."""
    run = new_run(path, steps=steps)
    start_ranks(run)
    line = json.dumps(step_metrics(1, loss=2.0).as_dict(), separators=(",", ":")) + "\n"
    losses = {777: "99.5", 888: "null"}
    with run.metrics.open("w") as file:
        for step in range(1, steps + 1):
            loss = losses.get(step, f"{2 + 8 / step:.6f}")
            file.write(line.replace('"step":1,', f'"step":{step},').replace('"loss":2.0', f'"loss":{loss}'))
    return run


def test_a_long_run_keeps_its_extremes_on_a_small_page(tmp_path: Path) -> None:
    facts = facts_of(long_run(tmp_path / "run", 4000))
    loss = facts["curves"]["loss"]
    assert len(loss["spread"]) == MAX_POINTS
    assert loss["most"] == [777, 99.5]
    assert max(row[3] for row in loss["spread"]) == 99.5
    assert facts["not_finite"] == [888]
    assert len(page_of(facts)) < 150_000


@pytest.mark.slow
def test_the_page_of_a_hundred_thousand_steps_takes_seconds(tmp_path: Path) -> None:
    run = long_run(tmp_path / "run", 100_000)
    began = time.process_time()
    text = page_of(facts_of(run))
    assert time.process_time() - began < SECONDS
    assert len(text) < 1_000_000


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="needs chromium")
def test_a_browser_shows_values_under_the_pointer_and_refuses_nothing(tmp_path: Path) -> None:
    """The page's policy would refuse a script that moves the pointer, so a copy without the policy is used."""
    path = tmp_path / "page.html"
    path.write_text(text := page_of(facts_of(hostile_run(tmp_path / "run"))))
    assert not re.search("Refused|violates|alert", browse(path)[1])
    move = "{ const each = document.querySelector('.plot-area'), box = each.getBoundingClientRect();"
    move += (
        "each.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right, clientY: box.top, bubbles: true})); }"
    )
    bare = re.sub("<meta http-equiv=[^>]*>", "", text).replace("</body>", f"<script>{move}</script></body>")
    path.write_text(bare)
    assert "<output>step 2  ·  loss 2</output>" in browse(path)[0]


def browse(path: Path) -> tuple[str, str]:
    """Return the DOM after chromium has run the page, and its console messages."""
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    profile = f"--user-data-dir={path.parent / 'profile'}"
    done = subprocess.run([*command, profile, path.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_downsampling_keeps_minimum_and_maximum() -> None:
    points = [(float(x), math.sin(x)) for x in range(5000)]
    found = curve(points, limit=10)
    assert len(found["spread"]) == 10
    assert min(row[1] for row in found["spread"]) == min(value for _, value in points) == found["least"][1]
    assert (found["spread"][0][0], found["spread"][-1][0]) == (0.0, 4999.0)
    assert curve([(1.0, math.nan)]) == {}
    assert curve([(1.0, 2.0), (2.0, math.inf)])["points"] == [(1.0, 2.0)]
    assert spread([(5.0, 1.0), (5.0, 3.0)]) == [(5.0, 1.0, 2.0, 3.0)]
    points = [(2.0, 1.0), (3.0, 7.0), (6.0, 2.0), (9.0, 4.0), (10.0, 5.0)]
    assert spread(points, limit=2) == [(2.5, 1.0, 4.0, 7.0), (25 / 3, 2.0, 11 / 3, 5.0)]
    assert spread(points, limit=4) == [(2.5, 1.0, 4.0, 7.0), (6.0, 2.0, 2.0, 2.0), (9.5, 4.0, 4.5, 5.0)]


@pytest.mark.parametrize(
    ("values", "unit", "labels"),
    [
        ([0.3, 10.08], "number", ["0", "3", "6", "9", "12"]),
        ([0.001, 0.001], "number", ["0", "0.00025", "0.0005", "0.00075", "0.001"]),
        ([1900.0, 2040.0], "count", ["1,880", "1,920", "1,960", "2,000", "2,040"]),
        ([3 * 2**30, 7 * 2**30], "bytes", ["0 B", "2.0 GiB", "4.0 GiB", "6.0 GiB", "8.0 GiB"]),
        ([0.2, 0.9], "share", ["0.0%", "25.0%", "50.0%", "75.0%", "100.0%"]),
        ([68.0e9, 68.1e9], "bytes", ["64,830.0 MiB", "64,860.0 MiB", "64,890.0 MiB", "64,920.0 MiB", "64,950.0 MiB"]),
        ([0.0], "seconds", ["0 ms", "250 ms", "500 ms", "750 ms", "1.0 s"]),
    ],
)
def test_tick_labels_are_round_and_distinct(values: list[float], unit: str, labels: list[str]) -> None:
    assert even_labels(even_axis(values, unit), unit) == labels


def test_a_wide_range_has_a_logarithmic_scale() -> None:
    axis = even_axis([0.03, 20.0], "number", may_log=True)
    assert even_labels(axis, "number") == ["0.01", "0.1", "1", "10", "100"]
    assert axis.place(1.0) == pytest.approx(0.5)


@pytest.mark.parametrize("values", [[-3.0, 5.0], [-2.0, -1.0], [1e-9, 1e9], [5.0, 5.0], [-5.0], [1e300], [0.1 + 0.2]])
def test_a_scale_covers_all_of_its_values(values: list[float]) -> None:
    axis = even_axis(values, "number")
    assert axis.low <= min(values)
    assert axis.high >= max(values) - 1e-9 * abs(max(values))


def test_text_is_escaped_and_markup_is_not() -> None:
    inner = tag("b", {"title": "\"<>&'"}, "<i>", Html("<br>"))
    assert inner == '<b title="&quot;&lt;&gt;&amp;&#x27;">&lt;i&gt;<br></b>'
    assert tag("p", {"hidden": True, "id": None}, inner) == f"<p hidden>{inner}</p>"
    assert re.fullmatch(r"<line x1=\"0\"/>", tag("line", {"x1": 0}))
