"""`python -m trimaran.launch.supervise.detached ACTION NAME`: a command that outlives its terminal or connection.

`start` runs it in a session of its own, with its output in LOGS/NAME.log. Its parent process writes
FOLDER/NAME.json, which says what process it is, and FOLDER/NAME.exit.json, its exit code. `follow` shows the log and
exits with that code, `state` prints what is known as a JSON object, `stop` sends a signal. Only the standard library
is imported.
"""

import argparse
import contextlib
import fcntl
import json
import os
import platform
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from trimaran.core import write_atomically
from trimaran.runs import machine_id, start_ticks

MODULE = "trimaran.launch.supervise.detached"
START_SECONDS = 60.0  # for the parent process to start, from a cold network disk
POLL_SECONDS = 0.1
EXIT_NOT_FOUND, EXIT_LOST = 127, 1
MAX_SECRETS_BYTES = 1 << 20


class DetachedProcess:
    """One detached command, identified by the folder of its files and its name."""

    def __init__(self, folder: Path, name: str, *, logs: Path | None = None) -> None:
        self.folder, self.name = folder, name
        self.log = (logs or folder) / f"{name}.log"
        self._record, self._exit = folder / f"{name}.json", folder / f"{name}.exit.json"

    def start(self, command: Sequence[str], *, secrets: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Start the command unless it is running, and return its state. `secrets` are added to its environment."""
        for folder in (self.folder, self.log.parent):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(self.folder / f"{self.name}.lock", "wb") as lock:
            with contextlib.suppress(OSError):  # a network disk without locks; the run's lease still allows one only
                fcntl.flock(lock, fcntl.LOCK_EX)
            known = self.state()
            if known["state"] == "running":
                return known | {"new": False}
            for path in (self._record, self._exit):
                path.unlink(missing_ok=True)
            parent = [sys.executable, "-m", MODULE, "run", self.name, f"--folder={self.folder}"]
            with open(self.log, "ab") as log:
                process = subprocess.Popen(
                    [*parent, f"--logs={self.log.parent}", "--", *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=os.environ | dict(secrets or {}),
                    start_new_session=True,
                )
            until = time.monotonic() + START_SECONDS
            while not self._record.exists() and not self._exit.exists() and process.poll() is None:
                if time.monotonic() > until:
                    break
                time.sleep(POLL_SECONDS / 10)
            process.returncode = 0  # it is not ours to wait for
            return self.state() | {"new": True}

    def state(self) -> dict[str, Any]:
        """Return `state` (none, running, ended, or lost: it is gone without an exit code), `code`, and the process."""
        record, end = _read(self._record), _read(self._exit)
        if end is not None:
            return {**(record or {}), **end, "state": "ended"}
        if record is None:
            return {"state": "none"}
        here = record["machine"] == machine_id()
        processes = ((record["pid"], record["started"]), (record["parent"], record["parent_started"]))
        if here and any(start_ticks(pid) == started for pid, started in processes):
            return {**record, "state": "running"}
        end = _read(self._exit)  # it may have ended since
        return {**record, "state": "lost"} if end is None else {**record, **end, "state": "ended"}

    def follow(self, offset: int, output: BinaryIO) -> int:
        """Write the log from `offset` on until the command has ended, or nobody reads; return its exit code."""
        watch = select.poll()
        watch.register(output.fileno(), 0)  # reports only that the other end is closed
        with open(self.log, "rb") as log:
            log.seek(min(offset, os.fstat(log.fileno()).st_size))
            while True:
                state = self.state()
                while data := log.read(1 << 16):
                    output.write(data)
                output.flush()
                if state["state"] != "running":
                    break
                if watch.poll(POLL_SECONDS * 1000):
                    return EXIT_LOST
        return state.get("code", EXIT_LOST)

    def send(self, number: signal.Signals) -> dict[str, Any]:
        """Send a signal to the command if it is running; return its state."""
        state = self.state()
        if state["state"] == "running":
            with contextlib.suppress(ProcessLookupError):
                os.kill(state["pid"], number)
        return state

    def run(self, command: Sequence[str]) -> None:
        """Run the command in this process's session, and record its process and exit code."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, lambda *_: None)  # meant for the command; unlike SIG_IGN it is not inherited
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        except OSError as error:
            answer = {"code": EXIT_NOT_FOUND, "error": f"{command[0]}: {error.strerror}"}
            write_atomically(self._exit, json.dumps(answer))
            return
        record = {"pid": process.pid, "started": start_ticks(process.pid), "parent": os.getpid()}
        record |= {"parent_started": start_ticks(os.getpid()), "machine": machine_id(), "host": platform.node()}
        write_atomically(self._record, json.dumps(record | {"time": time.time(), "log": str(self.log)}))
        code = process.wait()
        write_atomically(self._exit, json.dumps({"code": code if code >= 0 else 128 - code}))


def read_secrets(names: Sequence[str], stream: BinaryIO) -> dict[str, str]:
    """Return the variables `NAME=VALUE` in `stream`, which end with a zero byte each, if they are among `names`."""
    pairs = stream.read(MAX_SECRETS_BYTES).decode(errors="surrogateescape").split("\0")
    found = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return {name: value for name, value in found.items() if name in names}


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="A command that outlives its terminal.")
    parser.add_argument("action", choices=("start", "follow", "state", "stop", "run"))
    parser.add_argument("name", help="name of the command's files")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the files about its process")
    parser.add_argument("--logs", type=Path, help="folder of its log (default: FOLDER)")
    parser.add_argument("--offset", type=int, default=0, help="follow: leave out so many bytes of the log")
    parser.add_argument("--signal", default="TERM", choices=("TERM", "INT", "QUIT", "USR1"), help="stop: the signal")
    parser.add_argument("--secrets", default="", metavar="NAMES", help="start: variables to read from stdin")
    before = list(words[: words.index("--")]) if "--" in words else list(words)
    command = list(words[len(before) + 1 :])
    flags = parser.parse_args(before)
    process = DetachedProcess(flags.folder, flags.name, logs=flags.logs)
    if flags.action == "run":
        process.run(command)
        return 0
    if flags.action == "follow":
        try:
            code = process.follow(flags.offset, sys.stdout.buffer)
        except FileNotFoundError:
            sys.stderr.write(f"nothing was started here: there is no {process.log}\n")
            return EXIT_LOST
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to flush
            return EXIT_LOST
        state = process.state()
        if state["state"] == "lost":
            sys.stderr.write(f"process {state['pid']} is gone without an exit code; see {process.log}\n")
        return code
    if flags.action == "start":
        names = flags.secrets.split(",") if flags.secrets else []
        answer = process.start(command, secrets=read_secrets(names, sys.stdin.buffer) if names else {})
    else:
        answer = process.state() if flags.action == "state" else process.send(signal.Signals[f"SIG{flags.signal}"])
    sys.stdout.write(json.dumps(answer) + "\n")
    return EXIT_LOST if flags.action == "start" and "error" in answer else 0


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
