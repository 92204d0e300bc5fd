"""A request to profile some steps: from the recipe, or from a file in the directory of a running run."""

import contextlib
import json
import re
import secrets
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from trimaran.core.regular_files import read_regular_bytes, write_atomically
from trimaran.runs.run_directory import RunDirectory

MAX_STEPS = 100  # a trace grows by some hundred thousand spans a step
MAX_REQUEST_BYTES = 4096
RECIPE_ID = "recipe"
RANKS_PATTERN = re.compile(r"^(all|\d{1,9}(,\d{1,9})*)$")
TRACE_NAME = re.compile(r"^step-(\d{8})-rank-(\d+)\.trace\.json\.gz$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Profile `steps` steps of `ranks` ("all", or a list such as "0,3"): a trace, or a `memory` snapshot.

    `first` is the first step; 0 is the next one that all ranks agree on. `id` is unique for each request.
    """

    steps: int = 3
    ranks: str = "0"
    memory: bool = False
    first: int = 0
    id: str = field(default_factory=lambda: secrets.token_hex(8))

    def is_for(self, rank: int) -> bool:
        return self.ranks == "all" or str(rank) in self.ranks.split(",")

    def from_step(self, step: int, *, every: int) -> "ProfileRequest | None":
        """Return the part of this request from `step` on, which is repeated `every` so many steps; None without one."""
        over = step - (self.first + self.steps)  # steps since its end
        first = self.first if over < 0 or not every else self.first + every * (over // every + 1)
        left = first + self.steps - max(first, step)
        return replace(self, first=max(first, step), steps=left) if left > 0 else None

    def ranks_of(self, world_size: int) -> list[int]:
        """Return the requested ranks that exist in a run of this size."""
        return [rank for rank in range(world_size) if self.is_for(rank)]


def request_file(run: RunDirectory) -> Path:
    return run.profiles / "request.json"


def trace_file(run: RunDirectory, *, step: int, rank: int) -> Path:
    return run.profiles / f"step-{step:08d}-rank-{rank}.trace.json.gz"


def snapshot_file(run: RunDirectory, *, step: int, rank: int) -> Path:
    return run.profiles / f"memory-step-{step:08d}-rank-{rank}.json"


def write_request(run: RunDirectory, request: ProfileRequest) -> None:
    """Request a profile of a running run. This replaces an earlier request."""
    run.profiles.mkdir(exist_ok=True)
    write_atomically(request_file(run), json.dumps(asdict(request)))


def read_request(run: RunDirectory) -> ProfileRequest | None:
    """Return the pending request; None if there is none, or it is invalid."""
    try:
        tree = json.loads(read_regular_bytes(request_file(run), limit_bytes=MAX_REQUEST_BYTES))
        request = ProfileRequest(
            steps=int(tree["steps"]), ranks=str(tree["ranks"]), memory=bool(tree["memory"]), id=str(tree["id"])[:64]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return request if 1 <= request.steps <= MAX_STEPS and RANKS_PATTERN.match(request.ranks) else None


def withdraw_request(run: RunDirectory, request_id: str) -> None:
    """Remove the request, unless another one has replaced it."""
    request = read_request(run)
    if request is not None and request.id == request_id:
        with contextlib.suppress(OSError):
            request_file(run).unlink(missing_ok=True)


def recipe_request(profile: str, ranks: str) -> ProfileRequest | None:
    """Return the request in `telemetry.profile` ("10:13": steps 10, 11 and 12) and `telemetry.profile_ranks`."""
    if not profile:
        return None
    first, end = (int(each) for each in profile.split(":"))
    return ProfileRequest(first=max(1, first), steps=max(1, end - max(1, first)), ranks=ranks, id=RECIPE_ID)


def find_traces(run: RunDirectory) -> dict[int, dict[int, Path]]:
    """Return the traces of a run by first step, then by rank, both in order."""
    traces: dict[int, dict[int, Path]] = {}
    files = sorted(run.profiles.iterdir()) if run.profiles.is_dir() else []
    for path in files:
        if match := TRACE_NAME.match(path.name):
            traces.setdefault(int(match[1]), {})[int(match[2])] = path
    return {step: dict(sorted(ranks.items())) for step, ranks in sorted(traces.items())}
