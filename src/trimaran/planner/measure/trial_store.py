"""The folder of a tuning: its trials on disk, so that an interrupted tuning continues where it stopped."""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimaran.core import UserError
from trimaran.planner.measure.trial_record import MeasuredTrial
from trimaran.runs import JsonlFollower, append_line

TRIALS = "trials.jsonl"
ABOUT = "about.json"
LOCK = "lock"


class TrialStore:
    """The records of a folder. Lines before the last one that says `again` do not count any more."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: list[MeasuredTrial] = []
        self._num_runs = 0

    @property
    def path(self) -> Path:
        return self.folder / TRIALS

    def read(self) -> None:
        """Read the records that are on disk. Damaged lines are left out: their plans are measured again."""
        self.records = []
        for tree in JsonlFollower(self.path).new():
            if tree.get("again"):
                self.records = []
                continue
            try:
                self.records.append(MeasuredTrial.from_dict(tree))
            except (TypeError, ValueError):
                continue
        numbers = [int(path.name.removeprefix("trial-")) for path in self.folder.glob("trial-[0-9]*")
                   if path.name.removeprefix("trial-").isdigit()]  # fmt: skip
        self._num_runs = max(numbers, default=0)

    def add(self, record: MeasuredTrial) -> None:
        """Keep a record, on disk at once."""
        self.records.append(record)
        append_line(self.path, record.as_dict())

    def forget(self) -> None:
        """Have all records so far not count any more."""
        if self.records:
            append_line(self.path, {"again": True, "time": time.time()})
        self.records = []

    def new_run(self) -> Path:
        """Return the path of the next trial's run directory."""
        self._num_runs += 1
        return self.folder / f"trial-{self._num_runs:03d}"

    def runs(self) -> list[Path]:
        """Return the run directories of the records that count, which were measured."""
        return [self.folder / record.run for record in self.records if record.has_time]


@contextmanager
def locked_folder(folder: Path, about: dict[str, object]) -> Iterator[TrialStore]:
    """Create the folder if needed and lock it, and yield its records. Raises if another process tunes in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UserError("D003", f"the results cannot be written: {error.strerror}", where=str(folder),
                        fix="name a folder you may write to: --folder DIR") from None  # fmt: skip
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError("A040", "another `trimaran tune` measures in this folder", where=str(folder),
                            fix="wait for it: two at once would measure each other; or name another folder with "
                            "--folder DIR") from None  # fmt: skip
        (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        store = TrialStore(folder)
        store.read()
        yield store
    finally:
        os.close(descriptor)
