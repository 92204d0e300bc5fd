"""The processes that a command starts first, and what the warm fork server compares before it serves a run."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests import forked
from tests.environment import environment
from trimaran.launch import (
    EarlySupervisor,
    ask_warm,
    cancel_early,
    connect_warm,
    early_processes,
    resume_early,
    start_early,
    take_early,
    wait_for_arguments,
)
from trimaran.machine import stopped
from trimaran.runs import difference, runtime_folder, take_lock
from trimaran.runs.warm_protocol import fingerprint


def wait_for(condition: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_supervisor_that_gets_no_run_ends_with_its_fork_server() -> None:
    early = EarlySupervisor(warm=False)
    supervisor = psutil.Process(early.process.pid)
    wait_for(supervisor.children)
    (fork_server,) = supervisor.children()
    early.cancel()
    wait_for(lambda: is_gone(supervisor) and is_gone(fork_server))


def test_a_supervisor_ends_when_the_command_that_started_it_is_killed(tmp_path: Path) -> None:
    script = (
        "import time; from trimaran.launch.supervise.early_supervisor import *; start_early(['train'], {});"
        "print(early_processes()[0], flush=True); time.sleep(60)"
    )
    command = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    supervisor = psutil.Process(int(command.stdout.readline()))
    wait_for(supervisor.children)
    (fork_server,) = supervisor.children()
    command.kill()
    command.wait()
    wait_for(lambda: is_gone(supervisor) and is_gone(fork_server))


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [(["train", "--help"], {}), (["train", "--dry-run"], {}), (["train"], {"RANK": "0", "WORLD_SIZE": "2"})],
)
def test_nothing_is_started_early_where_no_run_follows(arguments: list[str], environment: dict[str, str]) -> None:
    start_early(arguments, environment)
    assert early_processes() == []
    assert take_early() is None
    cancel_early()


def test_arguments_come_from_the_command_line_or_from_the_descriptor() -> None:
    assert wait_for_arguments(["run", "--no-check"]) == ["run", "--no-check"]
    ours, theirs = os.pipe()
    with open(theirs, "w") as pipe:
        json.dump(["runs/a b", "--no-check"], pipe)
    assert wait_for_arguments([f"--arguments-from={ours}", "--warm"]) == ["--warm", "runs/a b", "--no-check"]


def test_a_refused_recipe_leaves_no_process_behind(tmp_path: Path) -> None:
    marked = environment(TRIMARAN_TEST_MARK=str(tmp_path))
    done = forked.run("trimaran", "train", "--set", "train.stepz=3", env=marked, cwd=tmp_path)
    assert (done.returncode, done.stderr[:5]) == (2, "R011:")
    wait_for(lambda: not [each for each in psutil.process_iter() if mark_of(each) == str(tmp_path)])


def mark_of(process: psutil.Process) -> str | None:
    try:
        return None if is_gone(process) else process.environ().get("TRIMARAN_TEST_MARK")
    except psutil.Error:
        return None


def test_processes_are_stopped_only_while_a_cpu_is_measured() -> None:
    parent = subprocess.Popen(["sh", "-c", "sleep 60 & wait"])
    process = psutil.Process(parent.pid)
    wait_for(process.children)
    (child,) = process.children()
    with stopped([parent.pid]):
        wait_for(lambda: {process.status(), child.status()} == {psutil.STATUS_STOPPED})
    wait_for(lambda: psutil.STATUS_STOPPED not in (process.status(), child.status()))
    for each in (process, child):
        each.kill()
    parent.wait()


def test_early_processes_that_were_left_stopped_continue() -> None:
    start_early(["train"], os.environ)
    try:
        (pid,) = early_processes()
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        resume_early()
        wait_for(lambda: psutil.Process(pid).status() != psutil.STATUS_STOPPED)
    finally:
        cancel_early()


def test_terminals_and_our_own_variables_do_not_change_the_fingerprint_of_a_process() -> None:
    ours = {"HOME": "/root", "TERM": "xterm", "SSH_TTY": "/dev/pts/1", "TRIMARAN_CACHE": "/a", "XDG_STATE_HOME": "/s"}
    assert difference(fingerprint(ours), fingerprint({"HOME": "/root", "TERM": "dumb", "TRIMARAN_LANG": "zh"})) == ""


def test_a_different_variable_limit_or_core_is_named() -> None:
    ours = fingerprint({"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "INFO"})
    assert difference(ours, fingerprint({"OMP_NUM_THREADS": "2"})) == "the variables NCCL_DEBUG, OMP_NUM_THREADS"
    assert difference(ours, ours | {"cores": [99], "umask": 0}) == "cores, umask"


def test_the_socket_is_only_in_a_folder_that_no_one_else_can_open(tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    folder = runtime_folder(environment)
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    assert runtime_folder(environment) is None
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert runtime_folder(environment) is None
    assert runtime_folder({"XDG_RUNTIME_DIR": str(tmp_path / "missing")}) is None


def test_there_is_one_warm_fork_server_per_user(tmp_path: Path) -> None:
    first = take_lock(tmp_path)
    assert first is not None
    assert take_lock(tmp_path) is None
    os.close(first)
    assert take_lock(tmp_path) is not None


def test_without_a_warm_fork_server_nothing_answers(tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert connect_warm(environment) is None
    assert ask_warm(environment, {"status": True}) is None
