"""Commands that outlive the session that starts them: their log, exit code, state, signals and secrets."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.fault.harness import wait_for
from trimaran.launch import DetachedProcess, read_secrets

MODULE = [sys.executable, "-m", "trimaran.launch.supervise.detached"]


def detached(folder: Path, action: str, *words: str, stdin: bytes = b"") -> tuple[int, bytes]:
    answer = subprocess.run([*MODULE, action, "node", f"--folder={folder}", *words], input=stdin,
                            capture_output=True, timeout=60, check=False)  # fmt: skip
    return answer.returncode, answer.stdout


def state(folder: Path) -> dict[str, Any]:
    return DetachedProcess(folder, "node").state()


def test_a_command_outlives_its_session_and_is_followed_to_its_exit_code(tmp_path: Path) -> None:
    folder = tmp_path / "it's $(here)"
    go = tmp_path / "go"
    script = f"echo begun; while [ ! -e '{go}' ]; do sleep 0.05; done; echo ended >&2; exit 75"
    assert state(folder) == {"state": "none"}
    code, answer = detached(folder, "start", "--", "sh", "-c", script)
    first = json.loads(answer)
    assert (code, first["state"], first["new"]) == (0, "running", True)
    assert os.getsid(first["pid"]) not in (os.getsid(0), first["pid"])
    again = json.loads(detached(folder, "start", "--", "false")[1])
    assert (again["pid"], again["started"], again["new"]) == (first["pid"], first["started"], False)
    go.touch()
    assert detached(folder, "follow") == (75, b"begun\nended\n")
    assert detached(folder, "follow", "--offset=6") == (75, b"ended\n")
    assert (state(folder)["state"], state(folder)["code"]) == ("ended", 75)
    assert json.loads(detached(folder, "start", "--", "true")[1])["new"]
    wait_for(lambda: state(folder)["state"] == "ended", 20)
    assert state(folder)["code"] == 0


def test_a_stopped_command_ends_with_its_own_code_and_a_killed_one_with_that_of_the_signal(tmp_path: Path) -> None:
    process = DetachedProcess(tmp_path, "node")
    process.start(["bash", "-c", "trap 'exit 75' TERM; echo ready; while :; do sleep 0.05; done"])
    wait_for(lambda: process.log.read_bytes() == b"ready\n", 20)
    assert process.send(signal.SIGTERM)["state"] == "running"
    wait_for(lambda: process.state()["state"] == "ended", 20)
    assert process.state()["code"] == 75
    process.start(["sleep", "60"])
    process.send(signal.SIGQUIT)
    wait_for(lambda: process.state()["state"] == "ended", 20)
    assert process.state()["code"] == 128 + signal.SIGQUIT


def test_a_reused_pid_is_not_mistaken_for_the_command(tmp_path: Path) -> None:
    process = DetachedProcess(tmp_path, "node")
    record = process.start(["sleep", "60"])
    os.kill(record["parent"], signal.SIGKILL)
    assert process.state()["state"] == "running"  # the command itself is alive
    os.kill(record["pid"], signal.SIGKILL)
    wait_for(lambda: process.state()["state"] == "lost", 20)
    path = tmp_path / "node.json"
    other = record | {"pid": os.getpid(), "parent": os.getpid()}  # our pid, with the start of another process
    path.write_text(json.dumps(other))
    assert process.state()["state"] == "lost"
    assert process.send(signal.SIGTERM)["state"] == "lost"  # and no signal is sent
    assert detached(tmp_path, "follow")[0] == 1


def test_a_command_that_does_not_exist_is_an_error_of_the_start(tmp_path: Path) -> None:
    code, answer = detached(tmp_path, "start", "--", "/no such program")
    assert (code, json.loads(answer)["error"]) == (1, "/no such program: No such file or directory")


def test_secrets_come_from_stdin_and_are_written_nowhere(tmp_path: Path) -> None:
    canary = 'canary-4711 = "$(x)"\n\''
    given = f"HF_TOKEN={canary}\0OTHER=leaked\0".encode()
    length = str(len(canary))
    script = 'printf "%s %s" "${#HF_TOKEN}" "${OTHER-none}"; sleep 0.2'
    code, answer = detached(tmp_path, "start", "--secrets=HF_TOKEN", "--", "bash", "-c", script, stdin=given)
    assert code == 0
    assert detached(tmp_path, "follow")[1].decode() == f"{length} none"
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir()) + answer
    assert b"canary" not in written


def test_secrets_are_read_only_by_name() -> None:
    class Stream:
        def read(self, size: int) -> bytes:
            return b"A=1\0B=2=3\0PATH=/evil\0junk\0"

    assert read_secrets(["A", "B"], Stream()) == {"A": "1", "B": "2=3"}  # type: ignore[arg-type]
