"""A request to change the plan of a running run, its answers in the events, and the plans that were replaced."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

from trimaran.core import Plan, Recipe, UserError, dump_recipe
from trimaran.core.regular_files import read_regular_bytes, write_atomically
from trimaran.runs.journal import JsonlFollower
from trimaran.runs.reserve import write_with_reserve
from trimaran.runs.run_directory import RunDirectory, dump_plan, writing

MAX_REQUEST_BYTES = 1 << 20
ChangeStatus = Literal["applied", "refused", "failed"]
Requester = Literal["user", "autopilot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRequest:
    """Change the fields of `patch`, which maps recipe fields to values, the pairs that `--set` takes.

    `id` counts the requests of a run from 1. `reason` is one sentence for people.
    """

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
        raise UserError("S042", f"change {pending.id} of this run is not answered yet", where=str(run.change_request),
                        fix="wait for it: `trimaran watch RUN` shows the answer")  # fmt: skip
    request = ChangeRequest(id=next_change_id(run, pending), patch=dict(patch), by=by, reason=reason)
    with writing(run):
        write_atomically(run.change_request, json.dumps(request.as_dict()))
    return request


def read_change_request(run: RunDirectory) -> ChangeRequest | None:
    """Return the pending request; None if there is none, or if it cannot be read."""
    try:
        tree = json.loads(read_regular_bytes(run.change_request, limit_bytes=MAX_REQUEST_BYTES))
        number, patch = tree["id"], tree["patch"]
        is_valid = isinstance(number, int) and isinstance(patch, dict) and all(isinstance(key, str) for key in patch)
        by: Requester = "autopilot" if tree.get("by") == "autopilot" else "user"
        return ChangeRequest(id=number, patch=patch, by=by, reason=str(tree.get("reason", ""))) if is_valid else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def change_answers(run: RunDirectory) -> Iterator[dict[str, Any]]:
    """Yield the `change` events of the run, the first first."""
    return (event for event in JsonlFollower(run.events(0)).new() if event.get("kind") == "change")


def next_change_id(run: RunDirectory, pending: ChangeRequest | None = None) -> int:
    """Return the id of the next request: one more than the largest so far."""
    known = [event["data"].get("id") for event in change_answers(run)]
    known += [pending.id] if pending is not None else []
    return 1 + max((each for each in known if isinstance(each, int)), default=0)


def withdraw_change_request(run: RunDirectory, request: ChangeRequest) -> None:
    """Remove the request if it is still pending. The ranks may have read it already, and answer it then."""
    pending = read_change_request(run)
    if pending is not None and pending.id == request.id:
        run.change_request.unlink(missing_ok=True)


def replace_plan(run: RunDirectory, plan: Plan) -> None:
    """Write `plan` as the run's plan, and keep the earlier one as `plan-N.json`."""
    _replace(run.plan, dump_plan(plan), reserve=run.reserve)


def replace_recipe(run: RunDirectory, recipe: Recipe) -> None:
    """Write `recipe` as the run's recipe if it differs, and keep the earlier one as `recipe-N.yaml`."""
    if recipe != run.read_recipe():
        _replace(run.recipe, dump_recipe(recipe), reserve=run.reserve)


def _replace(path: Path, text: str, *, reserve: Path) -> None:
    old = next(each for number in count() if not (each := path.with_stem(f"{path.stem}-{number}")).exists())
    draft = path.with_name(f".{path.name}.draft")
    write_with_reserve(reserve, lambda: draft.write_text(text, encoding="utf-8"))
    write_with_reserve(reserve, lambda: old.write_bytes(read_regular_bytes(path)))
    draft.replace(path)
