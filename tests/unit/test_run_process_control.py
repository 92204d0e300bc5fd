import os
import signal
import subprocess
import sys
import time
from pathlib import Path

NAME = """
from pathlib import Path
from trimaran.run.process_control import set_process_name
set_process_name("trimaran-3")
print(Path("/proc/self/comm").read_text())
"""
PARENT_IS_GONE = """
import os, signal
from trimaran.run.process_control import die_with_parent
die_with_parent(signal.SIGKILL, parent=os.getppid() + 1)
print("alive")
"""
CHILD = """
import os, signal, time
from trimaran.run.process_control import die_with_parent
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
