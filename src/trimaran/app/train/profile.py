"""`trimaran profile`: traces steps of a live run, shows what uses its memory, or records a run with Nsight Systems."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from trimaran.app.recipe.options import Json, Settings, complete_run_or_recipe, find_run, refuse_missing_ranks
from trimaran.app.show.clean_console import open_console, plain_table
from trimaran.core import UserError, read_regular_text, show_bytes
from trimaran.runs import RunDirectory, RunReader, is_running, last_step, writing
from trimaran.runs.run_requests import MAX_STEPS, ProfileRequest, find_traces, withdraw_request, write_request

NUMBERS_WIDTH = 32  # columns of the numbers of a row
MAX_ROWS = 10

POLL_SECONDS = 0.1
T = TypeVar("T")

RUN_HELP = "A run directory, or its name under runs/; with --nsys also a recipe."


def profile(
    run: Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=complete_run_or_recipe)],
    steps: Annotated[int, typer.Option(metavar="N", min=1, max=MAX_STEPS, help="How many steps.")] = 3,
    ranks: Annotated[str, typer.Option(metavar="LIST", help="The ranks: all, or a list such as 0,3.")] = "0",
    memory: Annotated[bool, typer.Option("--memory", help="Show what uses the memory, instead of a trace.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the newest traces of all ranks into one file.")] = False,
    nsys: Annotated[bool, typer.Option("--nsys", help="Record a short run of its own with Nsight Systems.")] = False,
    settings: Settings = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --nsys: only print the commands.")] = False,
    as_json: Json = False,
) -> None:
    """Trace the next steps of a live run, and show where their time goes.

    The run continues meanwhile. For a finished run the newest trace is shown. Files go to RUN/profiles; open traces at
    https://ui.perfetto.dev or chrome://tracing.

    `--nsys` does not touch RUN. It trains its recipe and plan, or a recipe with `--set`, for a few steps in a new run,
    on this machine, with each of the ranks under `nsys profile`, and shows the recorded phases.

    \b
    trimaran profile runs/stdlib-tiny --steps 3 --ranks all
    trimaran profile runs/stdlib-tiny --merge
    trimaran profile runs/stdlib-tiny --memory
    trimaran profile recipes/stdlib-tiny.yaml --nsys --ranks all
    """
    if nsys and (memory or merge):
        raise UserError("A001.nsys-makes-recording", where="trimaran profile")
    if nsys:
        from trimaran.app.train.nsys import nsys_request, planned_commands, record, summaries

        short = nsys_request(run, settings or [], steps=steps, ranks=ranks, needs_nsys=not dry_run)
        reports = [str(short.report(rank)) for rank in short.ranks]
        answer: dict[str, Any] = {"run_dir": str(short.path), "files": reports}
        if dry_run:
            answer["commands"] = planned_commands(short)
        else:
            with open_console(stderr=True).status(f"training {short.recipe.train.steps} steps in {short.path}"):
                record(short)
            answer["nsys"] = summaries(short)
    elif settings or dry_run:
        raise UserError("A001.set-dry-run", where="trimaran profile")
    elif merge:
        from trimaran.runs.read.traces import load_trace, write_merged
        from trimaran.runs.read.traces import merge as merge_traces

        directory = find_run(run)
        found = find_traces(directory)
        if not found:
            raise _no_profile(directory, "this run has no trace to merge")
        step = max(found)
        merged = merge_traces([load_trace(path) for path in found[step].values()])
        path = directory.profiles / "merged.trace.json.gz"
        with writing(directory):
            write_merged(merged, path)
        answer = {"run_dir": str(directory.path), "merged": str(path), "step": step, "ranks": [*found[step]],
                  "clocks": merged["clocks"]}  # fmt: skip
    else:
        directory = find_run(run)
        refuse_missing_ranks(ranks, directory.read_plan().mesh.world_size)
        request = ProfileRequest(steps=steps, ranks=ranks, memory=memory)
        files = _files(directory, request, open_console(stderr=True))
        answer = {"run_dir": str(directory.path), "files": [str(each) for each in files]}
        if memory:
            answer["memory"] = [json.loads(read_regular_text(each)) for each in files]
        else:
            from trimaran.runs.read.traces import load_trace, summarise

            answer["traces"] = [summarise(load_trace(each)).as_dict() for each in files]
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        show_profile(answer, open_console())


def _files(run: RunDirectory, request: ProfileRequest, console: Console) -> list[Path]:
    """Return the files that ranks write for `request`, until Ctrl-C; of a finished run, its newest traces."""
    if not is_running(run):
        found = find_traces(run)
        if request.memory or not found:
            raise _no_profile(run, "this run is not running")
        chosen = [path for rank, path in found[max(found)].items() if request.is_for(rank)]
        if not chosen:
            raise _no_profile(run, f"there is no trace of rank {request.ranks} at step {max(found)}")
        console.print("the run is not running; this is its newest trace")
        return chosen
    wanted = request.ranks_of(run.read_plan().mesh.world_size)
    reader = RunReader(run).follow(*map(run.events, wanted), backlog=0)
    with writing(run):
        write_request(run, request)
    paths: dict[int, Path] = {}

    def answer() -> dict[int, Path] | None:
        for rank in wanted:
            for event in reader.events(rank):
                data = event.get("data", {})
                if event.get("kind") != "profile" or data.get("request") != request.id:
                    continue
                if data.get("what") == "failed":
                    raise UserError(
                        "D012.rank-could", where=str(run.log(rank)), rank=rank, data=data.get("message", "")
                    )
                paths[rank] = run.path / str(data.get("path", ""))
            if rank not in paths:
                return None
        return paths

    def waiting() -> str:
        return f"rank {', '.join(str(rank) for rank in wanted if rank not in paths)}"

    ended = UserError("D010.run-ended-before", where=str(run.path))
    try:
        wait_for_answer(run, answer, console, waiting, ended)
    finally:
        withdraw_request(run, request.id)
    return [paths[rank] for rank in wanted]


def _no_profile(run: RunDirectory, what: str) -> UserError:
    return UserError("D010", what, where=str(run.path), fix="run `trimaran profile RUN` while it trains, or name the "
                     "steps in advance: `trimaran train --profile 10:13`")  # fmt: skip


def wait_for_answer(
    run: RunDirectory, answer: Callable[[], T | None], console: Console, waiting: Callable[[], str], ended: UserError
) -> T:
    """Return the answer of the ranks of a running run once there is one; raise `ended` if the run ends before."""
    shown = 0.0
    with console.status("") as status:
        while (found := answer()) is None:
            if time.monotonic() > shown + 1.0:
                status.update(f"step {last_step(run)}; waiting for {waiting()}")
                if not is_running(run) and answer() is None:
                    raise ended
                shown = time.monotonic()
            time.sleep(POLL_SECONDS)
    return found


def show_profile(answer: dict[str, Any], console: Console) -> None:
    """Print the answer of `trimaran profile`."""
    if "merged" in answer:
        ranks = ", ".join(map(str, answer["ranks"]))
        console.print(
            f"{answer['merged']}\nfrom step {answer['step']}, ranks {ranks}; open it at https://ui.perfetto.dev"
        )
        for host, clock in answer["clocks"].items():
            if clock["shift_microseconds"]:
                console.print(f"clock of {host} shifted by {clock['shift_microseconds'] / 1e3:+.3f} ms")
        return
    for command in answer.get("commands", ()):
        console.print(command, soft_wrap=True)
    for file, recorded in zip(answer["files"], answer.get("nsys", ()), strict=False):
        console.print(file, soft_wrap=True)
        phases = [each for each in recorded["ranges"] if each["is_phase"]]
        others = [each for each in recorded["ranges"] if not each["is_phase"]][:MAX_ROWS]
        if not phases:
            console.print("`nsys stats` has shown no ranges of this file; open it in Nsight Systems", soft_wrap=True)
            continue
        table = plain_table("time", "share", "calls", texts=[f"range of rank {recorded['rank']}"])
        for row in (*phases, *others):
            name = row["text"] if row["is_phase"] else f"  {row['text']}"
            table.add_row(f"{row['seconds'] * 1e3:.2f} ms", f"{row['share']:.1%}", f"{row['calls']:,}", name)
        console.print(table)
    for file, trace in zip(answer["files"], answer.get("traces", ()), strict=False):
        console.print(file, soft_wrap=True)
        (first, last), seconds = trace["steps"], trace["seconds"]
        idle = "device idle" if trace["on_device"] else "no operator running"
        text = f"steps {first} to {last} of rank {trace['rank']}: {seconds:.3f} s; {idle} {trace['idle'] / seconds:.1%}"
        if trace["communication"]:
            text += f"; communication {trace['communication'] / seconds:.1%}, exposed {trace['exposed'] / seconds:.1%}"
        console.print(text, soft_wrap=True)
        table = plain_table("self time", "share", "calls", texts=["kernel" if trace["on_device"] else "operator"])
        longest = max(20, console.width - NUMBERS_WIDTH)
        for row in trace["rows"][:MAX_ROWS]:
            name = row["name"]
            short = name if len(name) <= longest else f"{name[: longest - 3]}..."
            table.add_row(f"{row['seconds'] * 1e3:.2f} ms", f"{row['share']:.1%}", f"{row['calls']:,}", short)
        console.print(table)
    for file, memory in zip(answer["files"], answer.get("memory", ()), strict=False):
        console.print(file, soft_wrap=True)
        total = f" of {show_bytes(memory['total'])}" if memory.get("total") else ""
        held = "allocated" if memory["device"].startswith("cuda") else "resident"
        console.print(f"step {memory['step']} on {memory['device']}: {show_bytes(memory['allocated'])} {held}{total}")
        within = memory.get("within", {"kinds": {}, "holders": []})
        kinds = ", ".join(f"{kind} {show_bytes(size)}" for kind, size in (memory["kinds"] | within["kinds"]).items())
        console.print(f"known: {kinds}", soft_wrap=True)
        if peak := memory.get("peak"):
            console.print(f"peak: {show_bytes(peak['allocated'])}, of which {show_bytes(peak['from_before'])} was "
                          "allocated before the history began", soft_wrap=True)  # fmt: skip
        table = plain_table("bytes", "count", texts=["kind", "module"])
        rows = sorted([*memory["holders"], *within["holders"]], key=lambda row: -row["bytes"])
        for row in rows[:MAX_ROWS]:
            table.add_row(show_bytes(row["bytes"]), str(row["count"]), row["kind"], row["module"])
        console.print(table)
        lines = peak["lines"] if peak else memory["lines"]
        if lines:
            table = plain_table("bytes", "count", texts=["line", "function"])
            for row in lines[:MAX_ROWS]:
                where = f"{Path(row['file']).name}:{row['line']}" if row["file"] else "unknown"
                table.add_row(show_bytes(row["bytes"]), str(row["count"]), where, row["function"])
            console.print(table)
