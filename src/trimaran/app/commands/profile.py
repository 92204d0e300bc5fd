"""`trimaran profile`: ask a run at work what its steps do, and what holds its memory."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimaran.app.request.options import Json, RunName, find_run
from trimaran.core import UserError
from trimaran.run.profile_request import (
    MAX_STEPS,
    RANKS,
    ProfileRequest,
    find_traces,
    withdraw_request,
    write_request,
)

if TYPE_CHECKING:
    from rich.console import Console

    from trimaran.run import RunDirectory

LOOK_SECONDS = 0.1


def profile(
    run: RunName,
    steps: Annotated[int, typer.Option(metavar="N", min=1, max=MAX_STEPS, help="How many steps.")] = 3,
    ranks: Annotated[str, typer.Option(metavar="RANKS", help="Of which ranks: all, or such as 0,3.")] = "0",
    memory: Annotated[bool, typer.Option("--memory", help="What holds the memory, instead of a trace.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Make the newest traces of all ranks into one file.")] = False,
    as_json: Json = False,
) -> None:
    """Ask a run at work for a trace of its next steps, and show what they spend their time on.

    The run goes on meanwhile. Of a run that is over the newest trace is shown. Files go to RUN/profiles; traces open
    at https://ui.perfetto.dev or chrome://tracing.

    \b
    trimaran profile runs/stdlib-tiny --steps 3 --ranks all
    trimaran profile runs/stdlib-tiny --merge
    trimaran profile runs/stdlib-tiny --memory
    """
    from rich.console import Console

    directory = find_run(run)
    if merge:
        answer: dict[str, Any] = merge_newest(directory)
    else:
        request = _request(directory, steps, ranks, memory=memory)
        files = _files(directory, request, Console(stderr=True, highlight=False))
        answer = {"run_dir": str(directory.path), "files": [str(each) for each in files]}
        answer |= _read(files, memory=memory)
    if as_json:
        typer.echo(json.dumps(answer))
        return
    from trimaran.app.views.profile_view import show_profile

    show_profile(answer, Console(highlight=False, markup=False))


def merge_newest(run: "RunDirectory") -> dict[str, Any]:
    """Merge the traces of the newest steps that were traced, and return what `--merge --json` answers."""
    from trimaran.run import writing
    from trimaran.telemetry.merged_trace import merge, write_merged
    from trimaran.telemetry.trace_summary import load_trace

    found = find_traces(run)
    if not found:
        raise _nothing(run, "there is no trace of this run to merge")
    step = max(found)
    merged = merge([load_trace(path) for path in found[step].values()])
    path = run.profiles / "merged.trace.json.gz"
    with writing(run):
        write_merged(merged, path)
    clocks = merged["clocks"]
    return {"run_dir": str(run.path), "merged": str(path), "step": step, "ranks": [*found[step]], "clocks": clocks}


def _request(run: "RunDirectory", steps: int, ranks: str, *, memory: bool) -> ProfileRequest:
    world = run.read_plan().mesh.world_size
    if not RANKS.match(ranks) or (ranks != "all" and max(map(int, ranks.split(","))) >= world):
        raise UserError("A001", f"'{ranks}' does not name ranks of this run, which has {world}", where="--ranks",
                        fix=f"write all, or some of 0 to {world - 1}, such as 0")  # fmt: skip
    return ProfileRequest(steps=steps, ranks=ranks, memory=memory)


def _files(run: "RunDirectory", request: ProfileRequest, console: "Console") -> list[Path]:
    """Return the files that the ranks wrote for `request`, or, of a run that is over, its newest traces."""
    if is_at_work(run):
        return ask(run, request, console)
    found = find_traces(run)
    if request.memory or not found:
        raise _nothing(run, "this run is not at work, so it cannot be asked")
    chosen = [path for rank, path in found[max(found)].items() if request.is_for(rank)]
    if not chosen:
        raise _nothing(run, f"there is no trace of rank {request.ranks} at step {max(found)}")
    console.print("the run is not at work; this is its newest trace")
    return chosen


def _nothing(run: "RunDirectory", what: str) -> UserError:
    return UserError("D010", what, where=str(run.path), fix="ask while it trains: `trimaran profile RUN`, or name the "
                     "steps before: `trimaran train --profile 10:13`")  # fmt: skip


def is_at_work(run: "RunDirectory") -> bool:
    """Whether somebody runs the run; one on another machine is watched for some seconds."""
    from trimaran.run.lease import LOOK_SECONDS as SECONDS
    from trimaran.run.lease import LeaseWatch

    watch = LeaseWatch(run)
    while not isinstance(watch.look(), int):
        if watch.certain:
            return True
        time.sleep(SECONDS)
    return False


def ask(run: "RunDirectory", request: ProfileRequest, console: "Console") -> list[Path]:
    """Ask the ranks of a run at work and return what they have written. Whoever gives up takes the request back."""
    from trimaran.run import Follower, last_step, writing

    wanted = request.ranks_of(run.read_plan().mesh.world_size)
    followers = {rank: Follower(run.events(rank), backlog=0) for rank in wanted}
    with writing(run):
        write_request(run, request)
    paths: dict[int, Path] = {}
    try:
        with console.status("") as status:
            _wait(
                run,
                lambda: all(_heard(run, request, rank, each, paths) for rank, each in followers.items()),
                lambda: status.update(f"step {last_step(run)}; waiting for rank "
                                      f"{', '.join(str(rank) for rank in wanted if rank not in paths)}"),
            )  # fmt: skip
    finally:
        withdraw_request(run, request.id)
    return [paths[rank] for rank in wanted]


def _heard(run: "RunDirectory", request: ProfileRequest, rank: int, events: Any, paths: dict[int, Path]) -> bool:
    """Read on what `rank` tells; return whether it has answered."""
    for event in events.new():
        data = event.get("data", {})
        if event.get("kind") != "profile" or data.get("request") != request.id:
            continue
        if data.get("what") == "failed":
            raise UserError("D012", f"rank {rank} could not make the profile: {data.get('message', '')}",
                            where=str(run.log(rank)), fix="look at the end of this log; the run goes on")  # fmt: skip
        paths[rank] = run.path / str(data.get("path", ""))
    return rank in paths


def _wait(run: "RunDirectory", is_there: Callable[[], bool], show: Callable[[], None]) -> None:
    """Return when `is_there`; raise when the run ends before."""
    shown = 0.0
    while not is_there():
        if time.monotonic() > shown + 1.0:
            show()
            if not is_at_work(run) and not is_there():
                raise UserError("D010", "the run ended before it came to this", where=str(run.path),
                                fix="name the steps before: `trimaran train --profile 10:13`")  # fmt: skip
            shown = time.monotonic()
        time.sleep(LOOK_SECONDS)


def _read(files: list[Path], *, memory: bool) -> dict[str, Any]:
    """Return what the files say, for people and programs."""
    if memory:
        return {"memory": [json.loads(each.read_text(encoding="utf-8")) for each in files]}
    from trimaran.telemetry.trace_summary import load_trace, summarise

    return {"traces": [summarise(load_trace(each)).as_dict() for each in files]}
