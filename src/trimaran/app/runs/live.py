"""The live view of a run: a panel on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Iterable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from trimaran.app.runs.run_findings import FindingsPoller
from trimaran.app.runs.run_state import RunState, accuracy_texts
from trimaran.app.runs.run_view import draw, line
from trimaran.app.runs.status_lines import finding_lines, status_lines, store_notes
from trimaran.app.show.clean_console import print_plain
from trimaran.app.show.terminal import LogLine
from trimaran.app.show.text_chart import ORANGE
from trimaran.launch import incident_text

FRAME_SECONDS = 0.25
MAX_FRAME_SECONDS = 2.0
MAX_CPU_FRACTION = 0.05  # of a core that the live view may take from the ranks
LINE_SECONDS = 5.0
START_LINE_SECONDS = 1.0  # while a run starts


def follow(
    state: RunState, console: Console, *, has_ended: Callable[[], bool], poller: FindingsPoller | None = None
) -> None:
    """Show the run until `has_ended`; the log lines of the ranks scroll above the panel.

    `poller` polls the doctor's findings. `has_ended` is called before the files are read, so that everything written
    before the end is shown.
    """
    if console.is_terminal and not console.is_dumb_terminal and not console.options.ascii_only:
        _follow_in_panel(state, console, has_ended, poller)
        return
    # A line for the first and the last step, and every few seconds in between.
    shown, due, ended, evaluated = -1, 0.0, False, 0
    shown_incidents = {incident.id for incident in state.incidents}
    notes: set[str] = set()
    activity = ""
    while not ended:
        ended = has_ended()
        show_log(state.refresh(), console)
        show_notes(state, console, notes)
        if not state.step and (state.activity != activity or state.compiling) and time.monotonic() >= due:
            due = time.monotonic() + (START_LINE_SECONDS if state.activity != activity else LINE_SECONDS)
            activity, shown = state.activity, 0
            print_plain(console, line(state))
        show_incidents(state, console, shown_incidents)
        show_findings(state, console, poller)
        for step, loss in state.evaluations[evaluated:]:
            accuracy = "".join(f"  {text}" for text in accuracy_texts(state.accuracy, state.accuracy_counts))
            print_plain(console, f"step {step}  held-out loss {loss:.4f}{accuracy}")
        evaluated = len(state.evaluations)
        if state.step != shown and (ended or shown <= 0 or time.monotonic() >= due):
            print_plain(console, line(state))
            shown, due = state.step, time.monotonic() + LINE_SECONDS
        if not ended:
            time.sleep(FRAME_SECONDS)


def _follow_in_panel(
    state: RunState, console: Console, has_ended: Callable[[], bool], poller: FindingsPoller | None
) -> None:
    """Draw the panel a few times a second, with space on its right for the ^C that a terminal echoes."""
    shown = {incident.id for incident in state.incidents}
    notes: set[str] = set()
    with Live(console=console, auto_refresh=False) as live:
        ended = False
        while not ended:
            began = time.monotonic()
            ended = has_ended()
            show_log(state.refresh(), console)
            show_notes(state, console, notes)
            show_incidents(state, console, shown)
            show_findings(state, console, poller)
            lines, width = status_lines(state, poller), console.width - len("^C")
            live.update(draw(state, width=width, height=console.height, extra=lines), refresh=True)
            if not ended:
                drawing = time.monotonic() - began
                time.sleep(min(max(FRAME_SECONDS, drawing / MAX_CPU_FRACTION), MAX_FRAME_SECONDS))


def show_log(lines: Iterable[LogLine], console: Console) -> None:
    """Print the log lines of the ranks, each with its rank."""
    for each in lines:
        is_warning = any(word in each.text for word in ("WARN", "Warning", "ERROR", "Error", "Traceback"))
        text = (each.text, ORANGE if is_warning else "dim")
        console.print(Text.assemble((f"[rank {each.rank}] ", "dim"), text), soft_wrap=True)


def show_notes(state: RunState, console: Console, shown: set[str]) -> None:
    """Print, once, whether the run uses the warm fork server that was asked for, and what comes from the store."""
    fork_servers = (str(event.data.get("fork_server", "")) for event in state.current_events("start"))
    for note in filter(None, (*fork_servers, *store_notes(state))):
        if note not in shown:
            shown.add(note)
            print_plain(console, note)


def show_incidents(state: RunState, console: Console, shown: set[str]) -> None:
    """Print the text of every incident that has an action, once."""
    for incident in state.incidents:
        if incident.id not in shown and incident.action is not None:
            shown.add(incident.id)
            first, _, rest = incident_text(incident).partition("\n")
            console.print(Text(first, style=f"bold {ORANGE}"), soft_wrap=True)
            print_plain(console, rest)


def show_findings(state: RunState, console: Console, poller: FindingsPoller | None) -> None:
    """Poll the doctor if it is due, and print new findings with the command that fixes them."""
    if poller is None:
        return
    poller.poll()
    for finding in poller.new_findings():
        for each in finding_lines(finding):
            console.print(each, soft_wrap=True)
    if error := poller.new_error():
        print_plain(console, error)
