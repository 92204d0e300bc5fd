"""The report as one self-contained HTML file: it fetches nothing, and text that a run wrote never becomes markup."""

from typing import Any

from trimaran.ui.report.document import html_document
from trimaran.ui.report.run_sections import REPORT, SECTIONS

Tree = dict[str, Any]


def page_of(facts: Tree) -> str:
    """Return the page about `facts`."""
    return html_document(f"{facts['name']}: {facts['status']}", [SECTIONS[name].draw(facts) for name in REPORT])
