"""Requests to a running run: changes of its plan, profiles, and faults that a drill injects into a change."""

import contextlib
import json
import os
import re
import secrets
import signal
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from trimaran.core import UserError, read_regular_bytes, write_atomically
from trimaran.runs.journal import read_json_lines
from trimaran.runs.record_types import DAMAGED
from trimaran.runs.reserve import write_with_reserve
from trimaran.runs.run_directory import RunDirectory, dump_plan, writing

if TYPE_CHECKING:
    from trimaran.core import Plan, Recipe

ChangePhase = Literal["copy", "build", "hand-over", "release", "step", "commit", "files", "switch", "answer"]
"""Where a rank is in a change, in this order:

- `copy`: before the state is copied to memory
- `build`: the new networks exist, without values
- `hand-over`: half of the new tensors have their values
- `release`: the old state is freed
- `step`: the first step under the new plan is done, and no other rank knows yet
- `commit`: all ranks know it, and no file of the run directory has changed
- `files`: plan.json is new, and recipe.yaml is not
- `switch`: this rank has written the files, if that is its task, and still saves the state of the old plan
- `answer`: this rank saves the state of the new plan, and the request is not answered
"""
CHANGE_PHASES: tuple[ChangePhase, ...] = get_args(ChangePhase)
MAX_KILL_BYTES = 1 << 10


def request_kill(run: RunDirectory, rank: int, phase: ChangePhase) -> None:
    """Have `rank` kill itself once it reaches `phase` of a change, with SIGKILL."""
    with writing(run):
        write_atomically(run.kill_request, json.dumps({"rank": rank, "phase": phase}))


def reach_phase(run: RunDirectory, rank: int, phase: ChangePhase) -> None:
    """Die here if a drill asks for it, once. Every rank calls it at every phase of a change."""
    try:
        asked = json.loads(read_regular_bytes(run.kill_request, limit_bytes=MAX_KILL_BYTES))
    except (OSError, ValueError):
        return
    if asked == {"rank": rank, "phase": phase}:
        run.kill_request.unlink(missing_ok=True)
        os.kill(os.getpid(), signal.SIGKILL)


MAX_REQUEST_BYTES = 1 << 20
ChangeStatus = Literal["applied", "refused", "failed"]
Requester = Literal["user", "autopilot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRequest:
    """Change the fields of `patch`, pairs as of `--set`. `id` counts from 1; `reason` is one sentence for people."""

    id: int
    patch: Mapping[str, Any] = field(default_factory=dict)
    by: Requester = "user"
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def write_change_request(
    run: RunDirectory, patch: Mapping[str, Any], *, by: Requester = "user", reason: str = ""
) -> ChangeRequest:
    """Ask the ranks of a running run for a change, and return the request.

    A user's request replaces one of the autopilot that is not answered yet; any other pending request is an error.
    """
    pending = read_change_request(run)
    if pending is not None and (by == "autopilot" or pending.by == "user"):
        raise UserError("S042.change-run", where=str(run.change_request), pending=pending.id)
    known = [event["data"].get("id") for event in change_answers(run)]
    known += [pending.id] if pending is not None else []
    newest = max((each for each in known if isinstance(each, int)), default=0)
    request = ChangeRequest(id=newest + 1, patch=dict(patch), by=by, reason=reason)
    with writing(run):
        write_atomically(run.change_request, json.dumps(request.as_dict()))
    return request


def read_change_request(run: RunDirectory) -> ChangeRequest | None:
    """Return the pending request; None if there is none, or if it cannot be read."""
    with contextlib.suppress(*DAMAGED):
        tree = json.loads(read_regular_bytes(run.change_request, limit_bytes=MAX_REQUEST_BYTES))
        number, patch = tree["id"], tree["patch"]
        is_valid = isinstance(number, int) and isinstance(patch, dict) and all(isinstance(key, str) for key in patch)
        by: Requester = "autopilot" if tree.get("by") == "autopilot" else "user"
        return ChangeRequest(id=number, patch=patch, by=by, reason=str(tree.get("reason", ""))) if is_valid else None
    return None


def change_answers(run: RunDirectory) -> Iterator[dict[str, Any]]:
    """Yield the `change` events of the run, the first first."""
    return (event for event in read_json_lines(run.events(0)) if event.get("kind") == "change")


def withdraw_change_request(run: RunDirectory, request: ChangeRequest) -> None:
    """Remove the request if it is still pending. The ranks may have read it already, and answer it then."""
    pending = read_change_request(run)
    if pending is not None and pending.id == request.id:
        run.change_request.unlink(missing_ok=True)


def replace_plan(run: RunDirectory, plan: "Plan") -> None:
    """Write `plan` as the run's plan, and keep the earlier one as `plan-N.json`."""
    _replace(run.plan, dump_plan(plan), reserve=run.reserve)


def replace_recipe(run: RunDirectory, recipe: "Recipe") -> None:
    """Write `recipe` as the run's recipe if it differs, and keep the earlier one as `recipe-N.yaml`."""
    from trimaran.core import dump_recipe  # noqa: PLC0415  requests are made without pydantic

    if recipe != run.read_recipe():
        _replace(run.recipe, dump_recipe(recipe), reserve=run.reserve)


def _replace(path: Path, text: str, *, reserve: Path) -> None:
    old = next(each for number in count() if not (each := path.with_stem(f"{path.stem}-{number}")).exists())
    draft = path.with_name(f".{path.name}.draft")
    write_with_reserve(reserve, lambda: draft.write_text(text, encoding="utf-8"))
    write_with_reserve(reserve, lambda: old.write_bytes(read_regular_bytes(path)))
    draft.replace(path)


MAX_STEPS = 100  # a trace grows by some hundred thousand spans a step
MAX_PROFILE_BYTES = 4096
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
    with contextlib.suppress(*DAMAGED):
        tree = json.loads(read_regular_bytes(request_file(run), limit_bytes=MAX_PROFILE_BYTES))
        steps, ranks = int(tree["steps"]), str(tree["ranks"])
        if 1 <= steps <= MAX_STEPS and RANKS_PATTERN.match(ranks):
            return ProfileRequest(steps=steps, ranks=ranks, memory=bool(tree["memory"]), id=str(tree["id"])[:64])
    return None


def withdraw_request(run: RunDirectory, request_id: str) -> None:
    """Remove the request, unless another one has replaced it."""
    request = read_request(run)
    with contextlib.suppress(OSError):
        if request is not None and request.id == request_id:
            request_file(run).unlink()


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
