"""A run while it happens: a panel on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Iterable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from trimaran.app.views.logs import LogLine, printable
from trimaran.app.views.run_findings import Visits
from trimaran.app.views.run_state import RunState
from trimaran.app.views.run_view import draw, line
from trimaran.app.views.status_lines import finding_lines, glances
from trimaran.app.views.text_chart import ORANGE
from trimaran.launch.incident_text import incident_text

FRAME_SECONDS = 0.25
MAX_FRAME_SECONDS = 2.0
MAX_SHARE = 0.05  # of a core that the show may take from the ranks
LINE_SECONDS = 5.0


def follow(state: RunState, console: Console, *, over: Callable[[], bool], visits: Visits | None = None) -> None:
    """Show the run until `over` says that it has ended; everything the ranks print goes past above the image.

    With `visits` the doctor looks at the run now and then. `over` is asked before the files are read, so whatever was
    written before the end is shown.
    """
    if console.is_terminal and not console.is_dumb_terminal and not console.options.ascii_only:
        _follow_in_panel(state, console, over, visits)
    else:
        _follow_in_lines(state, console, over, visits)


def _follow_in_panel(state: RunState, console: Console, over: Callable[[], bool], visits: Visits | None) -> None:
    """Draw the panel a few times a second, with room behind it for the ^C that a terminal echoes."""
    shown = {incident.id for incident in state.incidents}
    with Live(console=console, auto_refresh=False) as live:
        ended = False
        while not ended:
            began = time.monotonic()
            ended = over()
            show_log(state.refresh(), console)
            show_incidents(state, console, shown)
            show_findings(state, console, visits)
            image = draw(state, width=console.width - len("^C"), height=console.height, extra=glances(state, visits))
            live.update(image, refresh=True)
            if not ended:
                drawing = time.monotonic() - began
                time.sleep(min(max(FRAME_SECONDS, drawing / MAX_SHARE), MAX_FRAME_SECONDS))


def _follow_in_lines(state: RunState, console: Console, over: Callable[[], bool], visits: Visits | None) -> None:
    """Print a line for the first step, for the last, and in between not more often than every few seconds."""
    shown, due, ended, evaluated = -1, 0.0, False, 0
    told = {incident.id for incident in state.incidents}
    while not ended:
        ended = over()
        show_log(state.refresh(), console)
        show_incidents(state, console, told)
        show_findings(state, console, visits)
        for step, loss in state.evaluations[evaluated:]:
            right = "".join(f"  {name} {share:.1%}" for name, share in state.accuracy.items())
            print_plain(console, f"step {step}  held-out loss {loss:.4f}{right}")
        evaluated = len(state.evaluations)
        if len(state.steps) != shown and (ended or shown <= 0 or time.monotonic() >= due):
            print_plain(console, line(state))
            shown, due = len(state.steps), time.monotonic() + LINE_SECONDS
        if not ended:
            time.sleep(FRAME_SECONDS)


def show_log(lines: Iterable[LogLine], console: Console) -> None:
    """Print what the ranks said, each line with the rank that said it."""
    for each in lines:
        loud = any(word in each.text for word in ("WARN", "Warning", "ERROR", "Error", "Traceback"))
        console.print(
            Text.assemble((f"[rank {each.rank}] ", "dim"), (each.text, ORANGE if loud else "dim")), soft_wrap=True
        )


def show_incidents(state: RunState, console: Console, shown: set[str]) -> None:
    """Print the incident_text of every incident about which something was done, once."""
    for incident in state.incidents:
        if incident.id not in shown and incident.action is not None:
            shown.add(incident.id)
            first, _, rest = printable(incident_text(incident)).partition("\n")
            console.print(Text(first, style=f"bold {ORANGE}"), soft_wrap=True)
            print_plain(console, rest)


def show_findings(state: RunState, console: Console, visits: Visits | None) -> None:
    """Let the doctor look if it is time to, and print what was not found before, with the command that mends it."""
    if visits is None:
        return
    visits.look()
    for told in visits.news():
        for each in finding_lines(told):
            console.print(each, soft_wrap=True)
    if trouble := visits.new_trouble():
        print_plain(console, printable(trouble))


def print_plain(console: Console, text: str) -> None:
    """Print `text` as it is: nothing in it is markup, and a long line stays one line."""
    console.print(Text(text), soft_wrap=True)
