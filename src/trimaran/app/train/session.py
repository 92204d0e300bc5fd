"""A run on this machine: prepares the data, starts the supervisor, shows the run and prints the result."""

import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType
from typing import Self

import typer
from rich.console import Console
from rich.text import Text

from trimaran.app.recipe.options import path_argument, program_name
from trimaran.app.recipe.prepare_data import prepare_data, refuse_before_start
from trimaran.app.recipe.request import Request
from trimaran.app.runs.live import follow, print_plain
from trimaran.app.runs.run_findings import FindingsPoller, read_findings
from trimaran.app.runs.run_state import RunState
from trimaran.app.runs.summary import explain_failure, summarise
from trimaran.app.show.clean_console import open_console, progress_bar
from trimaran.checkpoint.step_dirs import complete_steps
from trimaran.core import EXIT_AGAIN, EXIT_DONE, Bytes, Recipe, TrainSection, read_regular_text
from trimaran.cost import STATE_BYTES, checkpoint_bytes
from trimaran.launch import EXIT_FAULT, LocalRun, start_local
from trimaran.launch.supervise.early_supervisor import SHOW_SIGNAL
from trimaran.runs import HeldDirectory, RunDirectory, create_run, holds_run, refuse_full_disk, refuse_unusable, writing
from trimaran.runs.process_control import handled_signals
from trimaran.runs.run_requests import replace_plan, replace_recipe

POLL_SECONDS = 0.1
START_SECONDS = 5.0  # a run that starts has better things to do with the cores
END_SECONDS = 5.0
MIN_CHANGE = 0.05  # relative; a smaller change of the learning rate is not worth a line
PAUSED_NOTICE_SECONDS = 10.0


def run_here(request: Request, path: Path, *, as_json: bool, quiet: bool, warm: bool = False) -> int:
    """Train in `path` and return the exit code; with `as_json`, the live view goes to standard error."""
    console = open_console(stderr=as_json)
    return run_and_show(create_checked_run(request, path, console), console, as_json=as_json, quiet=quiet, warm=warm)


def create_checked_run(request: Request, path: Path, console: Console) -> RunDirectory:
    """Check that `request` can run here, prepare its data, and create the run directory."""
    return create_run(path, _prepare(request, path, console), request.plan)


def resume_here(
    request: Request, run: RunDirectory, *, replan: bool, as_json: bool, quiet: bool, warm: bool = False
) -> int:
    """Resume `run` with the recipe of `request`, and with its plan if `replan`, and return the exit code."""
    console = open_console(stderr=as_json)
    recipe = _prepare(request, run.path, console)
    if notice := schedule_notice(run, recipe):
        print_plain(console, notice)
    with writing(run):
        TemporaryFile(dir=run.path).close()  # a supervisor that cannot write cannot even report it
        if replan:
            replace_plan(run, request.plan)
        replace_recipe(run, recipe)  # last: if this process is killed in between, the next resume replans again
    return run_and_show(run, console, as_json=as_json, quiet=quiet, warm=warm)


def run_and_show(run: RunDirectory, console: Console, *, as_json: bool, quiet: bool, warm: bool = False) -> int:
    """Start the supervisor of `run`, show the run until it ends, and return the exit code."""
    state, held = RunState(run), HeldDirectory(run.path)
    held.watch()
    state.refresh()  # earlier events are not shown again
    ranks, show = start_local(run, warm=warm), partial(print_plain, console)
    poller = None if quiet else FindingsPoller(run, at_once=False)
    paused, show_ranks = PausedSupervisorNotice(ranks, show), ShowRanksSignal(ranks, show)
    has_moved = False
    with ExitStack() as at_the_end:
        at_the_end.callback(held.stop_watching)
        at_the_end.enter_context(handled_signals(show_ranks.receive, SHOW_SIGNAL))
        at_the_end.enter_context(autopilot_thread(run))
        stop = at_the_end.enter_context(StopSignals(ranks, show))

        def has_ended() -> bool:
            stop.handle()
            paused.check()
            show_ranks.handle()
            return ranks.poll() is not None

        def is_elsewhere() -> bool:
            """Whether files read by path are not those of the run any more: its directory was moved or deleted."""
            nonlocal has_moved
            if held.place != "here" and not has_moved:
                has_moved = True
                consequence = "stopping" if held.place == "deleted" else "stopping with a checkpoint there"
                show(f"{held.explain(held.place)}; {consequence}")
            return has_moved

        shown_on = Console(quiet=True) if quiet else console
        follow(state, shown_on, has_ended=lambda: has_ended() or is_elsewhere(), poller=poller)
        while not has_ended():
            time.sleep(POLL_SECONDS)
    code = ranks.wait()
    place = held.check()
    if place == "deleted":  # the exit code is never 0, as nothing is left
        lost, code = held.lost_error(), EXIT_FAULT if code == EXIT_DONE else code
        if as_json:
            typer.echo(json.dumps({"error": lost.as_dict(), "exit": code}))
        else:
            sys.stderr.write(f"{lost}\n")
        return code
    if code not in (EXIT_DONE, EXIT_AGAIN) and (error := ranks.read_error()):
        raise error
    if place == "moved" and (where := held.location) is not None and holds_run(where):
        print_plain(console, held.explain("moved"))
        state = RunState(RunDirectory(where))
    state.refresh()
    if stop.exit_code is not None and code != EXIT_DONE:
        code = stop.exit_code
    elif code not in (EXIT_DONE, EXIT_AGAIN):
        code = explain_failure(state, console, code)
    return print_result(state, console, code, as_json=as_json)


def print_result(state: RunState, console: Console, code: int, *, as_json: bool) -> int:
    """Print the result of a run, as text or as one JSON object, and return the exit code."""
    findings, error, _ = read_findings(state.run)
    if as_json:
        keys = {"findings": [each.as_dict() for each in findings], "doctor_trouble": error}
        typer.echo(json.dumps(state.as_dict() | {"exit": code} | keys))
        return code
    if state.status in ("done", "stopped"):
        summarise(state, console)
    if findings:
        codes = ", ".join(dict.fromkeys(each.finding.code for each in findings))
        text = f"{len(findings)} finding{'' if len(findings) == 1 else 's'} ({codes}); details: "
        command = shlex.join([program_name(), "doctor", path_argument(state.run.path)])
        console.print(Text.assemble(text, (command, "bold")), soft_wrap=True)
    return code


def _prepare(request: Request, path: Path, console: Console) -> Recipe:
    """Raise now what a rank would find minutes later: missing packages or weights, a full disk. Prepare the data."""
    refuse_unusable(os.environ, kernels=request.cluster.device.traits.has_kernels)
    refuse_before_start(request)
    if request.spec and request.outline:
        # An old checkpoint is deleted after the new one is complete, so there is one more than `checkpoint.keep`; and
        # another one that is being uploaded.
        recipe, num_parameters = request.recipe, request.outline.saved_parameters
        saves = recipe.checkpoint
        one = checkpoint_bytes(num_parameters, moment_bytes=STATE_BYTES[recipe.train.optimizer.states])
        most = saves.keep + 1 + bool(saves.store) if saves.every else 1
        added = 0 if saves.is_off else max(1, most - len(complete_steps(RunDirectory(path).checkpoints)))
        refuse_full_disk(path, Bytes(added * one + (4 * num_parameters if recipe.train.save else 0)))
    with progress_bar(console) as progress:
        return prepare_data(request.recipe, progress, partial(print_plain, console))


@contextmanager
def autopilot_thread(run: RunDirectory) -> Iterator[None]:
    """Run the autopilot of a run in a thread, which never disturbs the run or the view of it."""
    stop = threading.Event()

    def control_run() -> None:
        if stop.wait(START_SECONDS):
            return
        from trimaran.autopilot.controller import control
        from trimaran.machine import calibration_folder

        control(run, stop, calibrations=calibration_folder(os.environ))

    thread = threading.Thread(target=control_run, name="autopilot", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=END_SECONDS)


def schedule_notice(run: RunDirectory, new: Recipe) -> str:
    """Return a line about the learning rate of the next step if the new schedule changes it at once; else empty."""
    made = max(complete_steps(run.checkpoints), default=0)
    return learning_rate_change(run.read_recipe().train, new.train, made) if made else ""


def learning_rate_change(old: TrainSection, new: TrainSection, made: int) -> str:
    """Return how the learning rate of the step after the first `made` differs from that of the old schedule."""
    from trimaran.parallel.optimizer.build_optimizer import learning_rate

    # After the last step of the old schedule the learning rate would stay at the last value.
    before, after = learning_rate(min(made, old.steps - 1), old), learning_rate(made, new)
    if abs(after - before) < MIN_CHANGE * before:
        return ""
    direction = "rises" if after > before else "falls"
    return (
        f"the {new.schedule.kind} schedule now has {new.steps:,} steps, before {old.steps:,}: with step {made + 1:,} "
        f"the learning rate {direction} at once from {before:.3g} to {after:.3g} ({after / before:.2g} times)"
    )


class StopSignals:
    """Counts Ctrl-C and SIGTERM (once: schedulers send several); `handle` passes them on, outside the handler."""

    def __init__(self, ranks: LocalRun, show: Callable[[str], None]) -> None:
        self._ranks, self._show = ranks, show
        self._received = self._handled = 0
        self._signal: int | None = None
        self._handlers = handled_signals(self._count, signal.SIGINT, signal.SIGTERM)

    def __enter__(self) -> Self:
        self._handlers.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._handlers.__exit__(None, None, None)
        if kind is not None:
            self._ranks.kill()  # leave no rank behind, whatever went wrong here

    def _count(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT or not self._received:
            self._received += 1
            self._signal = number

    @property
    def exit_code(self) -> int | None:
        """The exit code of a command that was ended by a signal; None if it was not."""
        return None if self._signal is None or self._handled < 2 else 128 + self._signal

    def handle(self) -> None:
        if self._received > self._handled:
            first, self._handled = self._handled == 0 and self._received == 1, self._received
            if first:
                self._show("stopping after this step, with a checkpoint; Ctrl-C again to stop at once")
                self._ranks.request_stop(self._signal or signal.SIGTERM)
            else:
                self._show(f"stopping at once; finished checkpoints stay in {self._ranks.run.path}")
                self._ranks.end()


class PausedSupervisorNotice:
    """Prints a notice if a signal such as SIGSTOP has paused the supervisor for a while; it cannot do so itself."""

    def __init__(
        self, ranks: LocalRun, show: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ranks, self._show, self._clock = ranks, show, clock
        self._since: float | None = None
        self._shown = False

    def check(self) -> None:
        if not self._ranks.is_stopped:
            self._since, self._shown = None, False
            return
        self._since = self._clock() if self._since is None else self._since
        if not self._shown and self._clock() >= self._since + PAUSED_NOTICE_SECONDS:
            self._shown, pid = True, self._ranks.process.pid
            self._show(f"the supervisor (process {pid}) is stopped by a signal; to continue it: kill -CONT {pid}")


class ShowRanksSignal:
    """Forwards SIGUSR1 to the supervisor and prints what it then writes: the stacks and the memory of every rank."""

    def __init__(self, ranks: LocalRun, show: Callable[[str], None]) -> None:
        self._ranks, self._show, self._file = ranks, show, ranks.run.ranks_shown
        self._received = False
        self._awaited: int | None = None  # version of the file when SIGUSR1 was forwarded

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal: it is forwarded by `handle`."""
        self._received = True

    def handle(self) -> None:
        if self._received:
            self._received, self._awaited = False, self._version()
            self._ranks.process.send_signal(SHOW_SIGNAL)
        elif self._awaited is not None and self._version() != self._awaited:
            self._awaited = None
            for line in read_regular_text(self._file, errors="replace").splitlines():
                self._show(line)

    def _version(self) -> int:
        return self._file.stat().st_mtime_ns if self._file.exists() else 0
