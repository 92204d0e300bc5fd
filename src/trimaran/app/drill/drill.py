"""`trimaran drill`: injects faults into a run, and reports whether each was noticed, named and survived."""

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimaran.app.recipe.options import (
    RUNS,
    YAML,
    Json,
    NoCheck,
    Settings,
    complete_recipe,
    complete_run,
    find_run,
    path_argument,
    program_name,
)
from trimaran.core import UserError
from trimaran.runs import handled_signals

if TYPE_CHECKING:
    from rich.console import Console

    from trimaran.app.drill.drill_run import Drill, DrillResult, OwnRun
    from trimaran.app.drill.inject import DrillFault
    from trimaran.app.recipe.request import Request
    from trimaran.runs import RunDirectory

EXIT_NOT_PASSED = 1
EXIT_INTERRUPTED = 130


def complete_target(incomplete: str) -> list[str]:
    """Return the runs and recipes that complete `incomplete`."""
    runs = complete_run(incomplete)
    return [*runs, *(path for path in complete_recipe(incomplete) if path.rstrip("/") not in runs)]


def drill(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|RECIPE]",
            help="A live run, or a YAML file: a run of its own is started. [default: a small built-in recipe]",
            autocompletion=complete_target,
            show_default=False,
        ),
    ] = None,
    kill: Annotated[list[int] | None, typer.Option(metavar="RANK", min=0, help="Kill a rank (SIGKILL).")] = None,
    kill_in_change: Annotated[
        list[str] | None, typer.Option(metavar="RANK=PHASE", help="Kill a rank while the plan changes: 1=hand-over.")
    ] = None,
    stop: Annotated[list[int] | None, typer.Option(metavar="RANK", min=0, help="Stop a rank (SIGSTOP).")] = None,
    slow: Annotated[
        list[str] | None, typer.Option(metavar="RANK=FACTORx", help="Slow a rank down: 1=2x halves its speed.")
    ] = None,
    kill_loader: Annotated[
        list[int] | None, typer.Option(metavar="RANK", min=0, help="Kill a loader process of a rank.")
    ] = None,
    kill_fork_server: Annotated[
        bool, typer.Option("--kill-fork-server", help="Kill the process that forks the ranks.")
    ] = False,
    fill_disk: Annotated[bool, typer.Option("--fill-disk", help="Fill the disk of the run directory.")] = False,
    cut: Annotated[
        str, typer.Option(metavar="NODE", help="Cut this node, which is this machine, from the others.")
    ] = "",
    terminate: Annotated[
        bool, typer.Option("--terminate", help="Preempt the run (SIGTERM to its supervisor).")
    ] = False,
    kill_supervisor: Annotated[bool, typer.Option("--kill-supervisor", help="Kill the supervisor.")] = False,
    damage_checkpoint: Annotated[
        bool, typer.Option("--damage-checkpoint", help="Flip a bit in the newest checkpoint, and kill the supervisor.")
    ] = False,
    every_fault: Annotated[bool, typer.Option("--all", help="Every fault that can be injected here.")] = False,
    within: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=1.0, help="Limit of each drill. [default: from the run's own times]"),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it to a run that the drill has not started.")] = False,
    settings: Settings = None,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A new folder for its own run. [default: runs/NAME-drill]")
    ] = None,
    no_check: NoCheck = False,
    as_json: Json = False,
) -> int:
    """Inject faults into a run, one after another; report whether each is noticed, named and survived.

    With a recipe, the drill starts a run of its own, and stops it at the end. A run that it has not started is touched
    only with --yes: the faults are real, and steps may be lost.

    It reports the time until the fault is noticed, the time until the first new step, the steps that are repeated, and
    whether the right rank was named. Ctrl-C undoes what lasts. Results are also in RUN/drills.jsonl.

    Exit codes: 0 every fault was named and survived in time; 1 not all were; 2 a mistake in the options.

    \b
    trimaran drill recipes/stdlib-tiny.yaml --kill 1 --stop 0
    trimaran drill recipes/stdlib-tiny.yaml --all --json
    trimaran drill runs/stdlib-tiny --slow 1=2x --yes
    """
    from trimaran.app.drill.drill_run import OwnRun, is_own
    from trimaran.app.drill.inject import KINDS, DrillFault, parse_kill_in_change, parse_slow
    from trimaran.app.show.clean_console import open_console

    faults = [
        *(DrillFault(kind=KINDS["kill"], rank=rank) for rank in kill or []),
        *(parse_kill_in_change(text) for text in kill_in_change or []),
        *(DrillFault(kind=KINDS["stop"], rank=rank) for rank in stop or []),
        *(parse_slow(text) for text in slow or []),
        *(DrillFault(kind=KINDS["kill-loader"], rank=rank) for rank in kill_loader or []),
    ]
    flags = {"kill-fork-server": kill_fork_server, "fill-disk": fill_disk, "terminate": terminate}
    flags |= {"kill-supervisor": kill_supervisor, "damage-checkpoint": damage_checkpoint}
    faults += [DrillFault(kind=kind) for name, kind in KINDS.items() if flags.get(name)]
    faults += [DrillFault(kind=KINDS["cut"], node=cut)] if cut else []
    if not faults and not every_fault:
        raise UserError("A001.no-fault-named", where="`trimaran drill`", kinds=", ".join("--" + name for name in KINDS))
    console = open_console(stderr=True)
    try:
        with ExitStack() as stack:
            stack.enter_context(handled_signals(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP))
            own: OwnRun | None = None
            if target is None or target == "-" or YAML.search(target):
                from trimaran.app.recipe.prepare_data import check_data
                from trimaran.app.recipe.request import refuse_other_machine
                from trimaran.runs import free_run_path, refuse_occupied

                request = _request(target, settings or [], faults)
                path = run_dir or free_run_path(RUNS, f"{request.recipe.name}-drill")
                refuse_occupied(path)
                check_data(request.recipe)
                refuse_other_machine(request.cluster)
                if not no_check:
                    from trimaran.app.machine.machine_check import refuse_unfit_machine

                    refuse_unfit_machine(request)
                console.print(f"starting a run of its own in {path}")
                own = stack.enter_context(OwnRun(request, path, console))
                directory = own.run
            else:
                directory = find_run(target)
                if settings or run_dir:
                    option = "--set" if settings else "--run-dir"
                    raise UserError("A001.run-drill-starts", where=option, option=option)
                if not yes and not is_own(directory):
                    raise UserError("S032.run-not-started", where=str(directory.path))
            drills = Drills(directory, own, within, console)
            drills.run_all(faults, every_fault=every_fault, allow_root=yes)
    except KeyboardInterrupt:  # before the first fault, or a second time
        return EXIT_INTERRUPTED
    return drills.print_results(as_json=as_json)


class Drills:
    """The drills of one command: their results so far, the faults that were left out, and whether Ctrl-C ended them."""

    def __init__(self, run: "RunDirectory", own: "OwnRun | None", within: float | None, console: "Console") -> None:
        self.run, self._own, self._within, self._console = run, own, within, console
        self.results: list[DrillResult] = []
        self.skipped: list[tuple[str, str]] = []
        self.interrupted = False

    def run_all(self, faults: "list[DrillFault]", *, every_fault: bool, allow_root: bool) -> None:
        """Inject the faults in the order of `KINDS`; faults that cannot be injected here are in `skipped`."""
        from trimaran.app.drill.drill_run import Drill
        from trimaran.app.drill.inject import KINDS

        with self._console.status("") as status:
            drill = Drill(self.run, within=self._within, own=self._own, show=status.update)
            try:
                drill.refuse(faults, allow_root=allow_root)
                if every_fault:
                    faults += self._other_faults(drill, {each.kind.name for each in faults})
                ordered = sorted(faults, key=lambda each: [*KINDS].index(each.kind.name))
                for number, fault in enumerate(ordered):
                    self.results.append(drill.inject(fault))
                    restarts = fault.kind.restarts or fault.kind.ends_run
                    if restarts and self.results[-1].recovered_seconds is None:
                        why = f"the run did not go on after {fault.title}"
                        self.skipped += [(each.title, why) for each in ordered[number + 1 :]]
                        break
            except KeyboardInterrupt:
                self.interrupted = True

    def _other_faults(self, drill: "Drill", named: set[str]) -> "Iterator[DrillFault]":
        """Yield the faults that were not named and can be injected here; those that cannot are in `skipped`."""
        from trimaran.app.drill.inject import KINDS, DrillFault

        processes = drill.wait_for_steady_run()
        rank = max(processes.ranks)
        for name, kind in KINDS.items():
            if name in named or name in ("cut", "kill-in-change"):
                continue
            fault = DrillFault(kind=kind, rank=rank if name in ("kill", "stop", "slow", "kill-loader") else None)
            try:
                if kind.ends_run and self._own is None:
                    why = f"it ends the run; name it to do so: --{name}"
                elif name == "slow" and len(processes.hosts) < 2:
                    why = "one rank alone cannot be compared with others"
                else:
                    drill.refuse([fault], allow_root=False)
                    yield fault
                    continue
            except UserError as error:
                why = error.what
            self.skipped.append((fault.title, why))

    def print_results(self, *, as_json: bool) -> int:
        passed = bool(self.results) and all(each.passed for each in self.results) and not self.interrupted
        if as_json:
            drills = [asdict(each) for each in self.results]
            skipped = [{"fault": fault, "why": why} for fault, why in self.skipped]
            answer: dict[str, Any] = {"run_dir": str(self.run.path), "passed": passed, "drills": drills}
            typer.echo(json.dumps(answer | {"skipped": skipped, "interrupted": self.interrupted}))
        else:
            from rich.table import Table
            from rich.text import Text

            from trimaran.app.show.clean_console import open_console

            console = open_console()
            table = Table(box=None, pad_edge=False)
            for title in ("fault", "noticed", "new step", "lost", "cause", "named", "result"):
                table.add_column(title, justify="right" if title in ("noticed", "new step", "lost") else "left")
            for each in self.results:
                cause = each.cause or "-"
                table.add_row(
                    each.fault,
                    _seconds(each.detected_seconds),
                    _seconds(each.recovered_seconds),
                    "-" if each.lost_steps is None else str(each.lost_steps),
                    f"{cause} of rank {', '.join(map(str, each.suspects))}" if each.suspects else cause,
                    "yes" if each.named else "no",
                    Text("passed", style="green") if each.passed else Text("failed", style="bold red"),
                )
            if self.results:
                console.print(table)
            for each in self.results:
                if each.note:
                    console.print(Text(f"{each.fault}: {each.note}"), soft_wrap=True)
            for fault, why in self.skipped:
                console.print(Text(f"{fault}: left out: {why}"), soft_wrap=True)
            if self.interrupted:
                typer.echo("interrupted; everything that lasts was undone", err=True)
            typer.echo(f"details: {program_name()} incidents {path_argument(self.run.path)}")
        return EXIT_INTERRUPTED if self.interrupted else 0 if passed else EXIT_NOT_PASSED


def _request(file: str | None, settings: list[str], faults: "list[DrillFault]") -> "Request":
    """Return the resolved recipe of a run of the drill's own; raise if a fault names a rank that it will not have."""
    from dataclasses import replace

    from trimaran.app.recipe.recipe_files import with_model_tokenizer
    from trimaran.app.recipe.request import resolve

    request = resolve(file, settings)
    request = replace(request, recipe=with_model_tokenizer(request.recipe))
    last = request.plan.mesh.world_size - 1
    for fault in faults:
        if fault.rank is not None and fault.rank > last:
            raise UserError(
                "A001.rank-not-exist", where=f"--{fault.kind.name}", rank=fault.rank, num_ranks=last + 1, last=last
            )
    return request


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
