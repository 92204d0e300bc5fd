"""What reaches the terminal: no control code that stands in a file of a run."""

import io
import json
import os
import pty
import re
from pathlib import Path
from typing import Any

import pytest
from rich.live import Live
from rich.text import Text

from tests import forked
from tests.environment import environment
from tests.runs import finished_run
from tests.sources import SRC, text_of
from trimaran.app import CleanConsole, PrintableStream, main, printable
from trimaran.runs import RunDirectory

OSC, CLEAR, BELL, C1, REORDER = "\x1b]0;owned\x07", "\x1b[2J\x1b[1;1H", "\x07", "\x9b31m", "\u202e"
PLANTED = f"{OSC}{CLEAR}{BELL}{C1}{REORDER}\x1bPq\x1b\\[link=file:///x]"
STYLE_ONLY = re.compile(r"\x1b\[[0-9;]*m")


def planted_run(folder: Path) -> RunDirectory:
    """Return a finished run in whose files every text that is not a name has control codes."""
    run = finished_run(folder / "run", text=PLANTED)
    incident = {"id": "i-0001", "cause": "crash", "time": 1000.0, "what": f"rank 1 raised {PLANTED}", "step": 3,
                "suspects": [1], "evidence": {"rank 1": PLANTED, "log": [PLANTED]}, "action": "restarted"}  # fmt: skip
    run.incidents.write_text(json.dumps(incident) + "\n")
    for path in (run.path / "events").glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(_plant(line)) + "\n" for line in lines))
    (run.path / "logs").mkdir(exist_ok=True)
    (run.path / "logs" / "rank-0.log").write_text(f"WARN {PLANTED}\n")
    return run


def _plant(line: dict[str, Any]) -> dict[str, Any]:
    names = {"kind", "path", "host"}
    return {key: value + PLANTED if type(value) is str and key not in names else value for key, value in line.items()}


@pytest.mark.parametrize("command", ["incidents", "doctor", "watch", "report", "checkpoints list"])
def test_no_command_prints_control_codes_of_a_runs_files(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = planted_run(tmp_path)
    main([*command.split(), str(run.path)])
    shown = "".join(capsys.readouterr())
    assert shown.strip()
    assert printable(shown) == shown


def test_incidents_on_a_real_terminal_send_only_their_own_colours(tmp_path: Path) -> None:
    run, (parent, child) = planted_run(tmp_path), pty.openpty()
    own = environment(TERM="xterm-256color")
    assert forked.start("trimaran", "incidents", str(run.path), stdout=child, stderr=child, env=own).wait(60) == 0
    os.close(child)
    shown = ""
    while True:
        try:
            shown += os.read(parent, 65536).decode()
        except OSError:  # the end of a terminal without a writer
            break
    os.close(parent)
    assert STYLE_ONLY.search(shown)
    left = STYLE_ONLY.sub("", shown).replace("\r\n", "\n")
    assert "i-0001" in left
    assert printable(left) == left


def test_a_live_panel_keeps_its_own_cursor_codes_and_no_others() -> None:
    file = io.StringIO()
    console = CleanConsole(file=file, force_terminal=True, width=60, markup=False)
    with Live(Text(PLANTED + "first"), console=console, auto_refresh=False) as live:
        live.update(Text("second"), refresh=True)
    assert "\x1b[?25l" in file.getvalue()  # rich hides the cursor
    assert OSC not in file.getvalue()
    assert BELL not in file.getvalue()
    assert CLEAR not in file.getvalue()


def test_an_unexpected_error_and_a_library_cannot_print_control_codes() -> None:
    raw = io.StringIO()
    stream = PrintableStream(raw)
    print(f"name {PLANTED} end\ttab", file=stream)
    assert raw.getvalue() == "name [link=file:///x] end\ttab\n"
    assert not hasattr(stream, "buffer")


def test_every_console_of_the_commands_is_clean() -> None:
    allowed = {"clean_console.py", "run_view.py"}  # run_view measures heights and prints nothing
    files = [
        path for package in ("app", "serve", "ui") for path in (SRC / package).rglob("*.py") if path.name not in allowed
    ]
    assert [path.name for path in files if re.search(r"\bConsole\((?!quiet=True)", text_of(path))] == []
