"""What all pages of the web page share."""

from dataclasses import dataclass

from trimaran.app.show.error_language import Language
from trimaran.ui.web.runs_root import RunsRoot


@dataclass(frozen=True, slots=True, kw_only=True)
class WebState:
    """The runs, whether pages may change or start something, and the language of those that have not chosen one."""

    runs: RunsRoot
    may_write: bool = False
    language: Language | None = None
