"""Collects the goodput that views and sinks show for a run, to assert that they agree."""

import io
import json
import re
from contextlib import redirect_stdout

import pytest
from rich.console import Console

from trimaran.app import FindingsPoller, RunState, main, status_lines, summarise
from trimaran.core import PrometheusSection
from trimaran.runs import RunDirectory
from trimaran.ui import facts_of, page_of


def check_goodput(run: RunDirectory, goodput: float) -> None:
    """Assert that every view and sink shows `goodput` for the finished `run`: JSON exactly, text rounded."""
    with redirect_stdout(io.StringIO()) as answer:
        assert main(["watch", str(run.path), "--json"]) == 0
    status = json.loads(answer.getvalue())
    facts = facts_of(run)
    numbers = {
        "watch --json": status["goodput"],
        "the ledger of it": status["ledger"]["goodput"],
        "report --json": facts["goodput"],
        "Prometheus": _shown_by_a_new_sink(run),
    }
    assert numbers == pytest.approx(dict.fromkeys(numbers, goodput))
    state = RunState(run)
    state.refresh()
    console = Console(file=io.StringIO(), width=200)
    summarise(state, console)
    texts = {
        "summary": console.file.getvalue(),  # type: ignore[attr-defined]
        "watch": "\n".join(each.plain for each in status_lines(state, FindingsPoller(run, at_once=False))),
        "report": re.sub("<[^>]*>", " ", page_of(facts)),
    }
    for view, text in texts.items():
        assert re.search(rf"(?i)goodput +{100 * goodput:.1f}%", text), (view, text[-2000:])


def on_page(page: str) -> float:
    """Return the goodput on a Prometheus metrics page."""
    found = re.search(r"^trimaran_goodput_ratio\{[^}]*\} (\S+)$", page, re.MULTILINE)
    assert found, page[-2000:]
    return float(found[1])


def _shown_by_a_new_sink(run: RunDirectory) -> float:
    sink = pytest.importorskip("trimaran.runs.sinks.prometheus").PrometheusSink(run, PrometheusSection())
    sink.close()
    return on_page((run.path / "telemetry" / "metrics.prom").read_text())
