"""A whole HTML page with our style and script inside it: it fetches nothing."""

import base64
import hashlib
from collections.abc import Iterable
from importlib.resources import files

from trimaran.ui.report.markup import Html, tag


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


def _asset(name: str) -> Html:
    """Return one of our files unescaped."""
    return Html(files("trimaran.ui.report").joinpath(name).read_text(encoding="utf-8"))


def _digest(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
