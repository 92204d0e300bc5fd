"""What is to be profiled: named in the recipe, or asked of a run at work by a file in its directory."""

import contextlib
import json
import os
import re
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trimaran.run.run_directory import RunDirectory

MAX_STEPS = 100  # a trace grows by some hundred thousand spans a step
MAX_BYTES = 4096
RANKS = re.compile(r"^(all|\d{1,9}(,\d{1,9})*)$")
NAME = re.compile(r"^step-(\d{8})-rank-(\d+)\.trace\.json\.gz$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """`steps` steps of `ranks` ("all", or such as "0,3"): a trace of them, or where their `memory` goes.

    `first` is the step to begin with; 0 is the next one that all ranks agree on. `id` tells requests apart.
    """

    steps: int = 3
    ranks: str = "0"
    memory: bool = False
    first: int = 0
    id: str = field(default_factory=lambda: secrets.token_hex(8))

    def is_for(self, rank: int) -> bool:
        return self.ranks == "all" or str(rank) in self.ranks.split(",")

    def ranks_of(self, world_size: int) -> list[int]:
        """Return those of the ranks that there are."""
        return [rank for rank in range(world_size) if self.is_for(rank)]


def request_file(run: RunDirectory) -> Path:
    return run.profiles / "request.json"


def trace_file(run: RunDirectory, *, step: int, rank: int) -> Path:
    return run.profiles / f"step-{step:08d}-rank-{rank}.trace.json.gz"


def snapshot_file(run: RunDirectory, *, step: int, rank: int) -> Path:
    return run.profiles / f"memory-step-{step:08d}-rank-{rank}.json"


def write_request(run: RunDirectory, request: ProfileRequest) -> None:
    """Ask the ranks of a run at work; the request of somebody else, if there is one, is replaced."""
    run.profiles.mkdir(exist_ok=True)
    path = request_file(run)
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    draft.write_text(json.dumps(asdict(request)), encoding="utf-8")
    draft.replace(path)


def read_request(run: RunDirectory) -> ProfileRequest | None:
    """Return what is asked for; None when nothing is, or nothing that makes sense."""
    try:
        with request_file(run).open("rb") as file:
            tree = json.loads(file.read(MAX_BYTES))
        asked = ProfileRequest(
            steps=int(tree["steps"]), ranks=str(tree["ranks"]), memory=bool(tree["memory"]), id=str(tree["id"])[:64]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return asked if 1 <= asked.steps <= MAX_STEPS and RANKS.match(asked.ranks) else None


def withdraw_request(run: RunDirectory, request_id: str) -> None:
    """Take the request back, unless another one has taken its place."""
    asked = read_request(run)
    if asked is not None and asked.id == request_id:
        with contextlib.suppress(OSError):
            request_file(run).unlink(missing_ok=True)


def recipe_request(profile: str, ranks: str) -> ProfileRequest | None:
    """Return what `telemetry.profile` ("10:13" are the steps 10, 11 and 12) and `telemetry.profile_ranks` ask for."""
    if not profile:
        return None
    first, end = (int(each) for each in profile.split(":"))
    return ProfileRequest(first=max(1, first), steps=max(1, end - max(1, first)), ranks=ranks, id="recipe")


def find_traces(run: RunDirectory) -> dict[int, dict[int, Path]]:
    """Return the traces of a run: by their first step, then by rank, in order."""
    found: dict[int, dict[int, Path]] = {}
    names = sorted(run.profiles.iterdir()) if run.profiles.is_dir() else []
    for path in names:
        if match := NAME.match(path.name):
            found.setdefault(int(match[1]), {})[int(match[2])] = path
    return {step: dict(sorted(ranks.items())) for step, ranks in sorted(found.items())}
