"""Nodes that have no disk in common: what one asks the head before it follows it, and the files that it sends there.

The head answers with recipe and plan from its run directory. A node creates its own run directory from that, or
compares it. It sends what is new in its files in bounded pieces, with the offset in its file; the head appends them to
the file of the same name, and remembers how far it got, so that a piece that is sent again is not written twice.
"""

import json
import logging
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimaran.core import UserError, fixed_field_changes, parse_recipe
from trimaran.core.parse_text import TextError, load_json
from trimaran.core.regular_files import append_regular_file, open_regular_file, read_regular_text, write_atomically
from trimaran.launch.supervise.early_supervisor import Signals
from trimaran.runs import LeaseHolder, RunDirectory, create_run_from, holds_run, open_run, read_holder
from trimaran.runs.wire import ChannelClient, Record, RefusedError, WireError, fingerprint, pack, unpack

log = logging.getLogger(__name__)

STREAMED = ("events/rank-*.jsonl", "logs/rank-*.log", "telemetry/node-*.jsonl", "incidents/*/*", "incidents-*.jsonl")
FILE_NAME = re.compile(
    r"events/rank-\d{1,9}\.jsonl|logs/rank-\d{1,9}\.log|telemetry/node-\d{1,9}\.jsonl"
    r"|incidents/[A-Za-z0-9][\w.-]{0,200}/[\w-][\w.-]{0,200}|incidents-[A-Za-z0-9.-]{1,200}\.jsonl"
)
NODE_NAME = re.compile(r"[A-Za-z0-9.-]{1,200}")
PIECE_BYTES = 256 << 10
MAX_LINE_BYTES = 64 << 10  # a longer part of a line is sent without its end
MAX_MESSAGE_BYTES = 1 << 20


class FileSender:
    """Reads what is new in the files of this node. `sent` is how far the head has got with each, by name.

    A piece has at most `piece_bytes`. Of a line that is longer than `max_line_bytes` a part is sent without its end.
    """

    def __init__(
        self,
        run: RunDirectory,
        sent: Mapping[str, int],
        *,
        piece_bytes: int = PIECE_BYTES,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        self._run, self._sent = run, dict(sent)
        self._piece_bytes, self._max_line_bytes = piece_bytes, max_line_bytes

    def pieces(self, limit_bytes: int = MAX_MESSAGE_BYTES, *, is_last: bool = False) -> list[Record]:
        """Return the next pieces, of whole lines if they end soon, of about `limit_bytes` in sum at most.

        `is_last`: the ranks are gone, and a log that ends within a line is sent to its end.
        """
        found: list[Record] = []
        paths = [path for pattern in STREAMED for path in sorted(self._run.path.glob(pattern))]
        names = (str(path.relative_to(self._run.path)) for path in paths)
        for name in filter(FILE_NAME.fullmatch, names):
            while limit_bytes > 0 and (data := self._read(name, is_last=is_last)):
                offset = self._sent.get(name, 0)
                found.append({"name": name, "offset": offset, "data": pack(data)})
                self._sent[name] = offset + len(data)
                limit_bytes -= len(data)
        return found

    def _read(self, name: str, *, is_last: bool) -> bytes:
        path, offset = self._run.path / name, self._sent.get(name, 0)
        try:
            if path.lstat().st_size <= offset:
                return b""
            with open_regular_file(path) as file:
                data = os.pread(file.fileno(), self._piece_bytes, offset)
        except OSError:
            return b""  # a later call may succeed
        if name.startswith("incidents/") or (is_last and name.endswith(".log")):
            return data  # reports are written at once, and never again
        end = data.rfind(b"\n") + 1
        return data[:end] if end or len(data) < self._max_line_bytes else data


class FileReceiver:
    """Appends what the node `name` sends to the files of the head's run directory."""

    def __init__(self, run: RunDirectory, name: str) -> None:
        self._run = run
        self._state = run.path / "nodes" / f"{name}.json"
        self.received = read_received(run, name)

    def write(self, pieces: Sequence[Record]) -> None:
        """Append pieces, without what was received before. A piece that cannot be written is logged and lost."""
        for piece in pieces:
            name, offset, data = str(piece["name"]), int(piece["offset"]), unpack(piece["data"])
            if not FILE_NAME.fullmatch(name):
                raise WireError(f"a node sends a file that is not streamed: {name[:80]!a}")
            known = self.received.get(name, 0)
            new = data[max(0, known - offset) :]
            self.received[name] = max(known, offset + len(data))
            try:
                if new:
                    path = self._run.path / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with append_regular_file(path) as file:
                        file.write(new)
            except OSError as error:
                log.warning("%s of another node cannot be written: %s", name, error)
        if not pieces:
            return
        try:
            self._state.parent.mkdir(exist_ok=True)
            write_atomically(self._state, json.dumps(self.received) + "\n")
        except OSError as error:
            log.warning("%s cannot be written: %s", self._state, error)


def read_received(run: RunDirectory, name: str) -> dict[str, int]:
    """Return how much of each file of a node the head has received; nothing of a node that it does not know."""
    try:
        found = load_json(read_regular_text(run.path / "nodes" / f"{name}.json")) if NODE_NAME.fullmatch(name) else {}
    except (OSError, ValueError, TextError):
        return {}
    is_valid = isinstance(found, dict) and all(type(each) is int and each >= 0 for each in found.values())
    return found if is_valid else {}


RUN_FILES = "run_files"  # the operation that the head answers
ANSWER_SECONDS = 5.0
RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAnswer:
    """The head's recipe and plan as texts, the process that holds its lease, and what it has received of this node."""

    recipe: str
    plan: str
    created: float
    pid: int
    received: dict[str, int] = field(default_factory=dict)


class HeadClient:
    """Asks the head at `address`, `host:port`, as the node `name`. It also tells `Follower` who coordinates."""

    def __init__(self, address: str, token: str, name: str) -> None:
        self.holder = LeaseHolder(term=0, host=address.rpartition(":")[0], pid=0, started=0, machine="",
                                  run=fingerprint(token), address=address, created=time.time())  # fmt: skip
        self._token, self._name = token, name

    def poll(self) -> LeaseHolder:
        """Return who coordinates: always the head."""
        return self.holder

    def ask(self, signals: Signals, *, seconds: float) -> HeadAnswer | None:
        """Return the head's answer; None if it cannot be reached for `seconds`, or a stop is requested."""
        until, why = time.monotonic() + seconds, ""
        while not signals.stop_requested:
            try:
                with ChannelClient(self.holder.address, self._token, seconds=ANSWER_SECONDS) as client:
                    answer = client.request({"op": RUN_FILES, "node": self._name}, seconds=ANSWER_SECONDS)
                if "recipe" in answer:
                    return HeadAnswer(**answer)
                why = "it is not ready"
            except RefusedError as error:
                raise UserError("L023.head-runs", where=self.holder.address, run=error.run) from None
            except OSError as error:
                why = str(error)
            if time.monotonic() >= until:
                log.error("the head at %s cannot be reached for %g s: %s", self.holder.address, seconds, why)
                return None
            time.sleep(RETRY_SECONDS)
        return None


def answer_not_ready(request: Record) -> Record:
    """Return the answer to `HeadClient.ask` of a head that does not hold the lease yet."""
    return {"error": "not ready"}


def answer_nodes(run: RunDirectory, holder: LeaseHolder, request: Record) -> Record:
    """Return the answer to `HeadClient.ask` of the head, which holds the lease."""
    texts = {"recipe": read_regular_text(run.recipe), "plan": read_regular_text(run.plan)}
    known = {"created": holder.created, "pid": holder.pid, "received": read_received(run, str(request.get("node")))}
    return texts | known


def create_as_head_has_it(path: Path, answer: HeadAnswer) -> RunDirectory:
    """Return the run at `path`, created from the head's recipe and plan if there is none.

    Raises if it is another run, or if it is the head's own directory: the disk is shared.
    """
    if holds_run(path):
        run = open_run(path)
        holder = read_holder(run)
        if holder is not None and (holder.created, holder.pid) == (answer.created, answer.pid):
            raise UserError("L022.node-head-same", where=str(path))
        if changed := fixed_field_changes(run.read_recipe(), parse_recipe(answer.recipe, name="the head's recipe")):
            raise UserError("L024.head-runs", where=str(path), changed=", ".join(changed))
        return run
    source = RunDirectory(path.absolute().with_name(f".{path.name}-{secrets.token_hex(4)}"))
    source.path.mkdir(mode=0o700, parents=True)
    try:
        write_run_files(source, {"recipe": answer.recipe, "plan": answer.plan})
        return create_run_from(source.path, path)
    finally:
        for file in (source.recipe, source.plan):
            file.unlink(missing_ok=True)
        source.path.rmdir()


def write_run_files(run: RunDirectory, files: dict[str, Any]) -> None:
    """Write the head's recipe and plan, where they differ: ranks read them."""
    for path, text in ((run.recipe, files["recipe"]), (run.plan, files["plan"])):
        if not path.exists() or read_regular_text(path) != text:
            write_atomically(path, text)
