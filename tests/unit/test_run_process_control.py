import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cases import slow

NAME = """
from pathlib import Path
from trimaran.runs.process_control import set_process_name
set_process_name("trimaran-3")
print(Path("/proc/self/comm").read_text())
"""
PARENT_IS_GONE = """
import os, signal
from trimaran.runs.process_control import die_with_parent
die_with_parent(signal.SIGKILL, parent=os.getppid() + 1)
print("alive")
"""
CHILD = """
import os, signal, time
from trimaran.runs.process_control import die_with_parent
die_with_parent(signal.SIGKILL, parent=os.getppid())
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {CHILD!r}]); time.sleep(60)"


def test_the_process_name_is_set() -> None:
    assert subprocess.run([sys.executable, "-c", NAME], capture_output=True, text=True).stdout.strip() == "trimaran-3"


def test_a_process_whose_parent_is_already_gone_exits() -> None:
    result = subprocess.run([sys.executable, "-c", PARENT_IS_GONE], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")


def test_a_process_dies_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60.0
    while (stat := Path(f"/proc/{child}/stat")).exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


UNREAD = """
import sys
from trimaran.runs.process_control import drop_unread_output
drop_unread_output()
print("shown", flush=True)
sys.stdin.readline()  # until the reader has gone
for stream in (sys.stdout, sys.stderr):
    stream.write("dropped" * 10000)
    stream.flush()
sys.exit(75)
"""


def test_output_without_a_reader_is_dropped_and_the_exit_code_stays() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", UNREAD], stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"shown\n"
        process.stdout.close()
        process.stdin.close()
        assert process.wait() == 75
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-c", UNREAD]  # both closed from the beginning
    assert subprocess.run(closed, stdin=subprocess.DEVNULL).returncode == 75


@pytest.mark.parametrize(("command", "code"), [slow((["presets"], 0)), (["plan", "no-such-model"], 2)])
def test_a_command_whose_output_is_closed_has_its_exit_code(command: list[str], code: int) -> None:
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-m", "trimaran", *command]
    assert subprocess.run(closed, stdin=subprocess.DEVNULL).returncode == code
