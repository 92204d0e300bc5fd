"""`trimaran profile`: traces steps of a live run, or shows what uses its memory."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimaran.app.request.options import Json, RunName, find_run
from trimaran.core import UserError
from trimaran.core.regular_files import read_regular_text
from trimaran.run.profile_request import (
    MAX_STEPS,
    RANKS_PATTERN,
    ProfileRequest,
    find_traces,
    withdraw_request,
    write_request,
)

if TYPE_CHECKING:
    from rich.console import Console

    from trimaran.run import RunDirectory

POLL_SECONDS = 0.1


def profile(
    run: RunName,
    steps: Annotated[int, typer.Option(metavar="N", min=1, max=MAX_STEPS, help="How many steps.")] = 3,
    ranks: Annotated[str, typer.Option(metavar="LIST", help="The ranks: all, or a list such as 0,3.")] = "0",
    memory: Annotated[bool, typer.Option("--memory", help="Show what uses the memory, instead of a trace.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the newest traces of all ranks into one file.")] = False,
    as_json: Json = False,
) -> None:
    """Trace the next steps of a live run, and show where their time goes.

    The run continues meanwhile. For a finished run the newest trace is shown. Files go to RUN/profiles; open traces at
    https://ui.perfetto.dev or chrome://tracing.

    \b
    trimaran profile runs/stdlib-tiny --steps 3 --ranks all
    trimaran profile runs/stdlib-tiny --merge
    trimaran profile runs/stdlib-tiny --memory
    """
    from trimaran.app.views.clean_console import open_console

    directory = find_run(run)
    if merge:
        answer: dict[str, Any] = merge_newest_traces(directory)
    else:
        request = _request(directory, steps, ranks, memory=memory)
        files = _files(directory, request, open_console(stderr=True))
        answer = {"run_dir": str(directory.path), "files": [str(each) for each in files]}
        answer |= _read(files, memory=memory)
    if as_json:
        typer.echo(json.dumps(answer))
        return
    from trimaran.app.views.profile_view import show_profile

    show_profile(answer, open_console())


def merge_newest_traces(run: "RunDirectory") -> dict[str, Any]:
    """Merge the newest traces of all ranks, and return what `--merge --json` prints."""
    from trimaran.run import writing
    from trimaran.telemetry.merged_trace import merge, write_merged
    from trimaran.telemetry.trace_summary import load_trace

    found = find_traces(run)
    if not found:
        raise _no_profile(run, "this run has no trace to merge")
    step = max(found)
    merged = merge([load_trace(path) for path in found[step].values()])
    path = run.profiles / "merged.trace.json.gz"
    with writing(run):
        write_merged(merged, path)
    clocks = merged["clocks"]
    return {"run_dir": str(run.path), "merged": str(path), "step": step, "ranks": [*found[step]], "clocks": clocks}


def _request(run: "RunDirectory", steps: int, ranks: str, *, memory: bool) -> ProfileRequest:
    world = run.read_plan().mesh.world_size
    if not RANKS_PATTERN.match(ranks) or (ranks != "all" and max(map(int, ranks.split(","))) >= world):
        raise UserError("A001", f"'{ranks}' is not a list of ranks of this run, which has {world}", where="--ranks",
                        fix=f"write all, or some of 0 to {world - 1}, such as 0")  # fmt: skip
    return ProfileRequest(steps=steps, ranks=ranks, memory=memory)


def _files(run: "RunDirectory", request: ProfileRequest, console: "Console") -> list[Path]:
    """Return the files that the ranks wrote for `request`, or the newest traces of a finished run."""
    if is_running(run):
        return request_profile(run, request, console)
    found = find_traces(run)
    if request.memory or not found:
        raise _no_profile(run, "this run is not running")
    chosen = [path for rank, path in found[max(found)].items() if request.is_for(rank)]
    if not chosen:
        raise _no_profile(run, f"there is no trace of rank {request.ranks} at step {max(found)}")
    console.print("the run is not running; this is its newest trace")
    return chosen


def _no_profile(run: "RunDirectory", what: str) -> UserError:
    return UserError("D010", what, where=str(run.path), fix="run `trimaran profile RUN` while it trains, or name the "
                     "steps in advance: `trimaran train --profile 10:13`")  # fmt: skip


def is_running(run: "RunDirectory") -> bool:
    """Return whether a process runs the run; the lease of another machine is watched for some seconds."""
    from trimaran.run.lease import POLL_SECONDS as SECONDS
    from trimaran.run.lease import LeaseWatch

    watch = LeaseWatch(run)
    while not isinstance(watch.poll(), int):
        if watch.certain:
            return True
        time.sleep(SECONDS)
    return False


def request_profile(run: "RunDirectory", request: ProfileRequest, console: "Console") -> list[Path]:
    """Send `request` to the ranks of a live run and return the files they write. Ctrl-C withdraws the request."""
    from trimaran.run import JsonlFollower, last_step, writing

    wanted = request.ranks_of(run.read_plan().mesh.world_size)
    followers = {rank: JsonlFollower(run.events(rank), backlog=0) for rank in wanted}
    with writing(run):
        write_request(run, request)
    paths: dict[int, Path] = {}
    try:
        with console.status("") as status:
            _wait(
                run,
                lambda: all(_has_answered(run, request, rank, each, paths) for rank, each in followers.items()),
                lambda: status.update(f"step {last_step(run)}; waiting for rank "
                                      f"{', '.join(str(rank) for rank in wanted if rank not in paths)}"),
            )  # fmt: skip
    finally:
        withdraw_request(run, request.id)
    return [paths[rank] for rank in wanted]


def _has_answered(run: "RunDirectory", request: ProfileRequest, rank: int, events: Any, paths: dict[int, Path]) -> bool:
    """Read the new events of `rank`; return whether it has answered."""
    for event in events.new():
        data = event.get("data", {})
        if event.get("kind") != "profile" or data.get("request") != request.id:
            continue
        if data.get("what") == "failed":
            raise UserError("D012", f"rank {rank} could not make the profile: {data.get('message', '')}",
                            where=str(run.log(rank)), fix="see the end of this log; the run continues")  # fmt: skip
        paths[rank] = run.path / str(data.get("path", ""))
    return rank in paths


def _wait(run: "RunDirectory", is_done: Callable[[], bool], show: Callable[[], None]) -> None:
    """Return when `is_done`; raise if the run ends before."""
    shown = 0.0
    while not is_done():
        if time.monotonic() > shown + 1.0:
            show()
            if not is_running(run) and not is_done():
                raise UserError("D010", "the run ended before the profile was made", where=str(run.path),
                                fix="name the steps in advance: `trimaran train --profile 10:13`")  # fmt: skip
            shown = time.monotonic()
        time.sleep(POLL_SECONDS)


def _read(files: list[Path], *, memory: bool) -> dict[str, Any]:
    """Return the contents of the files, summarised."""
    if memory:
        return {"memory": [json.loads(read_regular_text(each)) for each in files]}
    from trimaran.telemetry.trace_summary import load_trace, summarise

    return {"traces": [summarise(load_trace(each)).as_dict() for each in files]}
