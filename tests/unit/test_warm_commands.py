"""A command that is forked looks and answers as one in a new interpreter."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import warm_commands
from tests.warm_commands import start_cold_commands, start_warm_commands

TRIMARAN = [sys.executable, "-m", "trimaran"]
COMMANDS = (["presets"], ["trian"], ["plan", "--set", "cluster=8xH100", "--json"])


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_fork_answers_as_a_new_interpreter(words: list[str], tmp_path: Path) -> None:
    own = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    warm = subprocess.run([*TRIMARAN, *words], env=own, cwd=tmp_path, capture_output=True, check=False)
    start_cold_commands()
    try:
        cold = subprocess.run([*TRIMARAN, *words], env=own, cwd=tmp_path, capture_output=True, check=False)
    finally:
        start_warm_commands()
    assert (warm.returncode, warm.stdout, warm.stderr) == (cold.returncode, cold.stdout, cold.stderr)


def waiting(folder: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Return a command that waits for its input."""
    return subprocess.Popen([*TRIMARAN, "predict", "-"], stdin=subprocess.PIPE, cwd=folder, stdout=subprocess.DEVNULL,
                            **options)  # fmt: skip


def test_a_fork_has_the_arguments_environment_folder_and_descriptors_that_were_asked_for(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    with waiting(tmp_path, env={**os.environ, "MARK": "1"}, start_new_session=True, pass_fds=[theirs]) as command:
        process = psutil.Process(command.pid)
        assert process.cmdline() == [*TRIMARAN, "predict", "-"]
        assert (process.environ()["MARK"], process.cwd(), process.ppid()) == ("1", str(tmp_path), os.getpid())
        assert os.getsid(command.pid) == command.pid
        held = {int(each.name) for each in Path(f"/proc/{command.pid}/fd").iterdir()}
        assert theirs in held
        assert ours not in held
        command.send_signal(signal.SIGTERM)
        assert command.wait(60) == -signal.SIGTERM, "the handlers of this process are not its"
    os.close(ours)
    os.close(theirs)


def test_the_end_of_a_fork_removes_nothing_of_this_process(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("")
    warm_commands.atexit.register(kept.unlink)
    try:
        assert subprocess.run([*TRIMARAN, "--version"], capture_output=True, check=False).returncode == 0
        assert kept.exists()
    finally:
        warm_commands.atexit.unregister(kept.unlink)


def test_a_variable_that_is_read_at_an_import_needs_a_new_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Any, ...]] = []
    start = warm_commands.START_PROGRAM
    monkeypatch.setattr(warm_commands, "START_PROGRAM", lambda *words: started.append(words) or start(*words))
    for variables, number in (({}, 0), ({"HF_ENDPOINT": "http://127.0.0.1:1"}, 1)):
        subprocess.run([*TRIMARAN, "--version"], env=os.environ | variables, capture_output=True, check=True)
        assert len(started) == number
