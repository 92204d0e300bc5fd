"""The report as one HTML file: styles and script inside, nothing fetched, nothing that a run wrote taken for markup."""

import base64
import hashlib
from importlib.resources import files
from typing import Any

from trimaran.app.report.markup import Html, tag
from trimaran.app.report.plot import shares_bar
from trimaran.app.report.plots import (
    PHASE_KINDS,
    machine_images,
    phases_image,
    spread_images,
    step_images,
    thinned_words,
)
from trimaran.app.report.sections import (
    behind,
    checkpoints,
    comparison,
    findings,
    header,
    incidents,
    ledger,
    outliers,
    weights,
)

Tree = dict[str, Any]


def page_of(facts: Tree) -> str:
    """Return the whole page about `facts`."""
    style, script = _asset("page.css"), _asset("page.js")
    # Even if markup slipped in, a browser would neither run nor fetch anything but these two.
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'"
    head = tag(
        "head", None,
        tag("meta", {"charset": "utf-8"}),
        tag("meta", {"http-equiv": "Content-Security-Policy", "content": policy}),
        tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        tag("title", None, f"{facts['name']}: {facts['status']}"),
        tag("style", None, style),
    )  # fmt: skip
    body = tag("body", None, tag("main", None, *_parts(facts)), tag("script", None, script))
    return "<!doctype html>\n" + tag("html", {"lang": "en"}, head, body) + "\n"


def _parts(facts: Tree) -> list[Html]:
    phases = facts["phases"]
    now = shares_bar(phases, PHASE_KINDS) if phases else Html("")
    return [
        header(facts),
        findings(facts),
        _section("What it did", _note(thinned_words(facts)), tag("div", {"class": "plots"}, *step_images(facts))),
        _section("Expected and measured", comparison(facts)),
        _section("Where a step's time goes", tag("div", {"class": "plots"}, phases_image(facts)), now),
        _section("Ranks", tag("div", {"class": "plots"}, *spread_images(facts)), outliers(facts)),
        _section("Weights", weights(facts)),
        _section("Where the time went", ledger(facts)),
        _section("What went wrong", incidents(facts)),
        _section("Checkpoints", checkpoints(facts)),
        _section("Machines", tag("div", {"class": "plots"}, *machine_images(facts))),
        behind(facts),
    ]


def _note(words: str) -> Html:
    return tag("p", {"class": "quiet"}, words) if words else Html("")


def _section(title: str, *content: Html) -> Html:
    """Return a part with its heading; nothing where there is nothing to show."""
    if not any(each not in ("", '<div class="plots"></div>') for each in content):
        return Html("")
    return tag("section", None, tag("h2", None, title), *content)


def _asset(name: str) -> Html:
    """Return a file of ours as it is: it is no text to be escaped."""
    return Html(files("trimaran.app.report").joinpath(name).read_text(encoding="utf-8"))


def _digest(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
