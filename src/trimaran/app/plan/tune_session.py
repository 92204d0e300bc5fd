"""A tuning on this machine: prepares the data once, keeps torch imported for all trials, and refits the rates."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from trimaran.app.machine.calibrate_runs import CalibrateAnswer, calibrate_runs
from trimaran.app.machine.calibration_file import refuse_unwritable, write_calibration
from trimaran.app.plan.interrupting_signals import signals_interrupt
from trimaran.app.plan.run_trial import run_trial
from trimaran.app.plan.tune_request import TuneRequest
from trimaran.app.plan.tune_view import TuneProgress
from trimaran.app.recipe.dry_run import refuse_before_start
from trimaran.app.recipe.prepare_data import check_data, prepare_data
from trimaran.app.runs.live import print_plain
from trimaran.app.show.progress_bar import progress_bar
from trimaran.core import UserError
from trimaran.launch.supervise.fork_server_process import ask_warm, start_warm
from trimaran.planner.measure.run_index import index_path, open_index
from trimaran.planner.measure.trial_record import MeasuredTrial, TrialLimits, TrialStore, TuneCandidate
from trimaran.planner.measure.tuner import StopReason, Tuner, TuneResult, TuneTask
from trimaran.runs.compile_cache import refuse_unusable

RUNTIME_FOLDER = "XDG_RUNTIME_DIR"  # where the socket of a warm fork server is
WARM_MINUTES = 10.0  # that the fork server stays without a trial, if this process is killed


@dataclass(frozen=True, slots=True)
class Refit:
    """What the trials say about the planner's rates: the fits, or why there are none."""

    answer: CalibrateAnswer | None
    trouble: str = ""


def tune_here(
    request: TuneRequest, store: TrialStore, console: Console, *, minutes: float, min_gain: float | None, check: bool
) -> TuneResult:
    """Measure plans of the request for `minutes` and return what was found. Ctrl-C ends it early.

    `min_gain` is the expected gain below which there are no more trials; None: the noise.
    """
    check_data(request.recipe)
    refuse_unusable(os.environ, kernels=request.question.cluster.device.traits.has_kernels)
    refuse_before_start(request.as_run)
    if check:
        from trimaran.app.machine.machine_check import refuse_unfit_machine

        refuse_unfit_machine(request.as_run)
    with progress_bar(console) as progress:
        recipe = prepare_data(request.recipe, progress, partial(print_plain, console))
    with TuneProgress(console, request.ranked[0]) as view, _warm_fork_server() as warm, signals_interrupt():

        def measure(candidate: TuneCandidate, limits: TrialLimits, /) -> MeasuredTrial:
            return run_trial(recipe, candidate, store.new_run(), limits, warm=warm, show=view.steps)

        task = TuneTask(
            question=request.question,
            recipe=recipe,
            ranked=request.ranked,
            minutes=minutes,
            min_gain=min_gain,
            free_workers=request.free_workers,
        )
        return Tuner(task, store, measure, view).run()


def refit_rates(runs: list[Path], stopped: StopReason) -> Refit:
    """Fit the planner's rates to the trials, and write them if predictions get better.

    Those of a tuning that was interrupted are not used: a few steps would change all later predictions.
    """
    if stopped == "interrupted":
        return Refit(None, "a tuning that was interrupted has measured too little; the same command continues it")
    try:
        answer = calibrate_runs([str(run) for run in runs], cluster=None, output=None)
        for each in answer.better:
            refuse_unwritable(each.path)
            assert each.calibration is not None
            write_calibration(each.path, each.calibration)
    except UserError as error:
        return Refit(None, error.what)
    return Refit(answer)


def add_to_history(runs: list[Path]) -> None:
    """Add the measured plans to the index of `trimaran history`, so that `trimaran plan` knows them."""
    index = open_index(index_path(os.environ))
    index.refresh([run.absolute() for run in runs])
    index.write()


@contextmanager
def _warm_fork_server() -> Iterator[bool]:
    """Start a warm fork server for the trials alone, and yield whether there is one.

    That of the user may differ from the trials in its environment, and every trial would then import torch.
    """
    known = os.environ.get(RUNTIME_FOLDER)
    with TemporaryDirectory(prefix="trimaran-tune-") as folder:
        os.environ[RUNTIME_FOLDER] = folder
        try:
            yield start_warm(os.environ, idle_minutes=WARM_MINUTES)
        finally:
            ask_warm(os.environ, {"stop": True})
            if known is None:
                del os.environ[RUNTIME_FOLDER]
            else:
                os.environ[RUNTIME_FOLDER] = known
