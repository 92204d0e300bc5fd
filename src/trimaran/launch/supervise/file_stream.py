"""Sends the files that the ranks of a node write to the head, if the nodes have no disk in common.

The node sends what is new in bounded pieces, with the offset in its file; the head appends them to the file of the same
name in its run directory, and remembers how far it got, so that a piece that is sent again is not written twice.
"""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trimaran.core.parse_text import TextError, load_json
from trimaran.core.regular_files import append_regular_file, open_regular_file, read_regular_text, write_atomically
from trimaran.runs import RunDirectory
from trimaran.runs.wire import Record, WireError, pack, unpack

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
        for name in self._names():
            while limit_bytes > 0 and (data := self._read(name, is_last=is_last)):
                offset = self._sent.get(name, 0)
                found.append({"name": name, "offset": offset, "data": pack(data)})
                self._sent[name] = offset + len(data)
                limit_bytes -= len(data)
        return found

    def _names(self) -> Iterator[str]:
        for pattern in STREAMED:
            for path in sorted(self._run.path.glob(pattern)):
                name = str(path.relative_to(self._run.path))
                if FILE_NAME.fullmatch(name):
                    yield name

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
                self._append(self._run.path / name, new)
            except OSError as error:
                log.warning("%s of another node cannot be written: %s", name, error)
        if pieces:
            self._remember()

    def _append(self, path: Path, data: bytes) -> None:
        if data:
            path.parent.mkdir(parents=True, exist_ok=True)
            with append_regular_file(path) as file:
                file.write(data)

    def _remember(self) -> None:
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
