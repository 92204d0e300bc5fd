"""The report as one self-contained HTML file: it fetches nothing, and text that a run wrote never becomes markup."""

import base64
import hashlib
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from trimaran.app.report.layout_picture import rank_layout
from trimaran.app.report.markup import Html, tag
from trimaran.app.report.plot import stacked_bar
from trimaran.app.report.plots import (
    PHASE_KINDS,
    downsample_note,
    machine_plots,
    phases_plot,
    spread_plots,
    step_plots,
)
from trimaran.app.report.sections import (
    checkpoints,
    comparison,
    findings,
    header,
    incidents,
    last_decision,
    ledger,
    outliers,
    reproduction,
    weights,
)

Tree = dict[str, Any]


def page_of(facts: Tree) -> str:
    """Return the page about `facts`."""
    return html_document(f"{facts['name']}: {facts['status']}", _parts(facts))


def html_document(title: str, parts: Iterable[Html]) -> str:
    """Return a whole page with our style and script inside it."""
    style, script = _asset("page.css"), _asset("page.js")
    # Even if markup slipped in, a browser would run and fetch nothing but these two.
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'"
    head = tag(
        "head", None,
        tag("meta", {"charset": "utf-8"}),
        tag("meta", {"http-equiv": "Content-Security-Policy", "content": policy}),
        tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        tag("title", None, title),
        tag("style", None, style),
    )  # fmt: skip
    body = tag("body", None, tag("main", None, *parts), tag("script", None, script))
    return "<!doctype html>\n" + tag("html", {"lang": "en"}, head, body) + "\n"


def _parts(facts: Tree) -> list[Html]:
    phases = facts["phases"]
    now = stacked_bar(phases, PHASE_KINDS) if phases else Html("")
    return [
        header(facts),
        _section("Training", _note(downsample_note(facts)), tag("div", {"class": "plots"}, *step_plots(facts))),
        findings(facts),
        last_decision(facts),
        _section("Parallel layout", tag("p", None, facts["plan_words"]), rank_layout(facts)),
        _section("Predicted and measured", comparison(facts)),
        _section("Time of a step", tag("div", {"class": "plots"}, phases_plot(facts)), now),
        _section("Ranks", tag("div", {"class": "plots"}, *spread_plots(facts)), outliers(facts)),
        _section("Weights", weights(facts)),
        _section("Time of the run", ledger(facts)),
        _section("Incidents", incidents(facts)),
        _section("Checkpoints", checkpoints(facts)),
        _section("Machines", tag("div", {"class": "plots"}, *machine_plots(facts))),
        reproduction(facts),
    ]


def _note(text: str) -> Html:
    return tag("p", {"class": "quiet"}, text) if text else Html("")


def _section(title: str, *content: Html) -> Html:
    """Return a section with its heading; empty if there is nothing to show."""
    if not any(each not in ("", '<div class="plots"></div>') for each in content):
        return Html("")
    return tag("section", None, tag("h2", None, title), *content)


def _asset(name: str) -> Html:
    """Return one of our files unescaped."""
    return Html(files("trimaran.app.report").joinpath(name).read_text(encoding="utf-8"))


def _digest(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
