"""What all pages of the web page share."""

from dataclasses import dataclass

from trimaran.app.web.runs_root import RunsRoot


@dataclass(frozen=True, slots=True, kw_only=True)
class WebState:
    """The runs, and whether pages may change or start something."""

    runs: RunsRoot
    may_write: bool = False
