"""A tuning on this machine: what is asked for, the trials, how they are shown, and the recipe that is written."""

import importlib.metadata
import json
import os
import platform
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from rich.console import Console
from rich.text import Text

from trimaran.app.machine.bench import refuse_unwritable, write_calibration
from trimaran.app.machine.calibrate_runs import CalibrateAnswer, calibrate_runs
from trimaran.app.plan.plan_answer import pinned_recipe_text
from trimaran.app.plan.run_trial import run_trial
from trimaran.app.recipe.ask_torch import ask_hf_facts
from trimaran.app.recipe.options import RUNS
from trimaran.app.recipe.prepare_data import check_data, prepare_data, refuse_before_start
from trimaran.app.recipe.recipe_files import with_local_files, with_model_tokenizer
from trimaran.app.recipe.request import Request, read_question, refuse_other_machine, with_absolute_paths
from trimaran.app.runs.live import print_plain
from trimaran.app.show.clean_console import progress_bar
from trimaran.app.show.terminal import aligned
from trimaran.app.show.text_chart import GREEN, RED
from trimaran.core import VERSION, Plan, Recipe, UserError, show_bytes, show_seconds
from trimaran.core.regular_files import read_regular_bytes, write_atomically
from trimaran.launch.supervise.fork_server_process import ask_warm, start_warm
from trimaran.machine import refuse_mixed
from trimaran.models import refuse_freezing
from trimaran.planner import Question, no_fit_error, search
from trimaran.planner.measure.fit_rates import median_error
from trimaran.planner.measure.run_index import job_of_plan
from trimaran.planner.measure.trial_record import MeasuredTrial, TrialLimits, TrialStore, TriedCandidate, TuneCandidate
from trimaran.planner.measure.tuner import StopReason, Tuner, TuneResult, TuneTask
from trimaran.runs import handled_signals, refuse_unusable

MAX_PLANS = 24  # of the planner, each with another mesh
TUNED_FOLDER = "tune"  # below runs/
# Of the data section: what changes how long a step takes, and not only which samples it has.
SHAPE_OF_DATA = ("source", "seq_len", "images_per_sample", "image_size", "isolate_documents", "samples")
MAX_NOT_TRIED = 10
COLUMNS = ("predicted", "measured", "±", "steps", "memory", "plan: what differs from the first choice")
SHOWN_SETTINGS = ("sharding", "recompute", "offload", "loss", "compile", "cuda_graphs")
RUNTIME_FOLDER = "XDG_RUNTIME_DIR"  # where the socket of a warm fork server is
WARM_MINUTES = 10.0  # that the fork server stays without a trial, if this process is killed
HEADER = "# Written by `trimaran tune`"
MAX_HEADER_BYTES = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """A recipe to tune: `recipe` is that of trials, `written` the user's; `about` is what results depend on."""

    question: Question
    recipe: Recipe
    written: Recipe
    ranked: tuple[Plan, ...]
    about: dict[str, Any]
    folder: Path


def read_tune_request(file: str | None, settings: Sequence[str], folder: Path | None) -> TuneRequest:
    """Return the recipe and its plans, the best first. Raises as `train` does, and for another machine."""
    question = read_question(file, settings, trains=True)
    refuse_mixed(question.cluster, "a tuning")
    refuse_other_machine(question.cluster)
    recipe = with_absolute_paths(question.recipe)
    refuse_freezing(recipe.model)
    facts, _ = ask_hf_facts(recipe.model, os.environ)
    question = replace(question, recipe=recipe, facts=facts, max_plans=MAX_PLANS)
    answer = search(question)
    if not answer.ranked:
        raise no_fit_error(answer)
    # What measured step times depend on beside the plan: model, data shape, cluster and software.
    job = job_of_plan(recipe, question.outline, str(question.cluster), platform.node())
    data = recipe.data.model_dump(mode="json", include={*SHAPE_OF_DATA})
    data["samples"].pop("images")
    about = {
        "model": job.model,
        "seq_len": job.seq_len,
        "global_batch": job.global_batch,
        "states": job.states,
        "cluster": job.cluster,
        "host": job.host or platform.node(),
        "cores": len(os.sched_getaffinity(0)),
        "data": data,
        "precision": recipe.train.precision,
        "deterministic": recipe.train.deterministic,
        "trimaran": VERSION,
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
    }
    digest = sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:8]
    return TuneRequest(
        question=question,
        recipe=with_model_tokenizer(with_local_files(recipe)),
        written=recipe,
        ranked=(*answer.ranked, *(tie.plan for tie in answer.ties)),
        about=about,
        folder=folder or RUNS / TUNED_FOLDER / f"{recipe.name}-{digest}",
    )


class TuneProgress:
    """A live line on a terminal, and a line for each trial that has ended."""

    def __init__(self, console: Console, first: Plan) -> None:
        self._console, self._first = console, first
        self._status = console.status("preparing")
        self._number, self._head = 0, ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def starting(self, candidate: TuneCandidate, *, why: str, best: TriedCandidate | None, left: float) -> None:
        self._number += 1
        shown = f"best {_step(best.seconds)}, " if best and best.seconds else ""
        self._head = f"trial {self._number}: {describe(candidate, self._first)} ({why}); {shown}"
        self._head += f"{show_seconds(max(0.0, left))} left"
        self._status.update(self._head)

    def steps(self, seconds: Sequence[float]) -> None:
        if seconds and self._console.is_terminal:
            self._status.update(f"{self._head}; step {len(seconds)}: {_step(seconds[-1])}")

    def finished(self, record: MeasuredTrial, candidate: TuneCandidate) -> None:
        result = record.outcome
        if record.has_time:
            result = f"{_step(record.step_seconds)} ± {(record.measured or {}).get('sigma', 0.0):.1%}"
        result += f": {record.reason}" if record.reason else ""
        took, name = show_seconds(record.trial_seconds), describe(candidate, self._first)
        print_plain(self._console, f"{self._number:3}  {took:>7}  {result}  {name}")


def describe(candidate: TuneCandidate, first: Plan) -> str:
    """Return a candidate as text: what differs from the planner's first choice."""
    plan = candidate.plan
    parts = [str(plan.mesh)] if plan.mesh != first.mesh else []
    if (plan.micro_batch, plan.grad_accum) != (first.micro_batch, first.grad_accum):
        parts.append(f"micro-batch {plan.micro_batch} x {plan.grad_accum}")
    changed = [field for field in SHOWN_SETTINGS if getattr(plan, field) != getattr(first, field)]
    parts += [_setting(field, getattr(plan, field)) for field in changed]
    if plan.mesh.pp > 1 and plan.pipeline != first.pipeline:
        parts.append(plan.pipeline.schedule)
    parts += [_setting(field, value) for field, value in plan.comm if value != getattr(first.comm, field)]
    if candidate.origin == "loader processes":
        parts.append(f"loader processes {candidate.workers}")
    return ", ".join(parts) or "the planner's first choice"


def _setting(field: str, value: object) -> str:
    if isinstance(value, bool):
        return f"{field} {'on' if value else 'off'}"
    name = "shard" if field == "sharding" else field
    return f"{name} every {value}" if field == "recompute" and isinstance(value, int) else f"{name} {value}"


@dataclass(frozen=True, slots=True)
class Refit:
    """What the trials say about the planner's rates: the fits, or why there are none."""

    answer: CalibrateAnswer | None
    trouble: str = ""


def show_tuning(result: TuneResult, refit: Refit, first: Plan, console: Console) -> None:
    """Print what was tried, fastest first, and what was not; the gain; and the rates. Rows are never cut."""
    console.print(Text.assemble(("the planner's first choice  ", "dim"), str(first)), soft_wrap=True)
    console.print()
    rows: list[tuple[tuple[str, ...], str]] = [(COLUMNS, "dim")]
    for each in sorted(result.tried, key=lambda each: each.seconds or float("inf")):
        style = f"bold {GREEN}" if each is result.best else RED if each.seconds is None else ""
        notes = [describe(each.candidate, first)]
        notes += ["the best"] if each is result.best else []
        notes += [f"{each.num_trials} trials"] if each.num_trials > 1 else []
        notes += [each.outcome] if each.outcome != "measured" else []
        measured = (f"{each.sigma:.1%}", f"{each.num_steps}") if each.seconds else ("", "")
        memory = show_bytes(each.peak_bytes) if each.peak_bytes else ""
        text = "; ".join(notes) + (f": {each.reason}" if each.reason else "")
        times = (_step(each.candidate.predicted_seconds), _step(each.seconds) or "-")
        rows.append(((*times, *measured, memory, text), style))
    reason = {"time": "time was over", "interrupted": "interrupted"}.get(result.stopped, "too little to expect")
    left = []
    for each in result.proposals:
        gain = f", gain {each.gain:.1%}" if each.gain < 1 else ""
        left.append((each.candidate, f"{reason}; expected {_step(each.seconds)}{gain}"))
    left += [(each.candidate, each.why) for each in result.left_out]
    for candidate, why in left[:MAX_NOT_TRIED]:
        cells = (_step(candidate.predicted_seconds), "-", "", "", "", f"{describe(candidate, first)}; not tried: {why}")
        rows.append((cells, "dim"))
    for line, (_, style) in zip(aligned([cells for cells, _ in rows], len(COLUMNS) - 1), rows, strict=True):
        console.print(Text(line, style=style), soft_wrap=True)
    if (more := len(left) - MAX_NOT_TRIED) > 0:
        console.print(Text(f"and {more:,} more that were not tried; --json lists them", style="dim"))
    console.print()
    console.print(Text(f"stopped after {show_seconds(result.seconds)}: {result.why}"), soft_wrap=True)
    if result.best is not None and result.best is result.first and result.gain is not None:
        console.print(Text("the planner's first choice is the fastest of those that were measured"))
    elif result.best is not None and result.first is not None and result.gain is not None:
        error = (result.best.sigma**2 + result.first.sigma**2) ** 0.5
        console.print(Text.assemble((f"{result.gain:.1%} less time a step", f"bold {GREEN}"), f" (± {error:.1%}) than "
                                    f"the planner's first choice: {_step(result.best.seconds)} instead of "
                                    f"{_step(result.first.seconds)}"), soft_wrap=True)  # fmt: skip
    if refit.answer is None:
        console.print(Text(f"calibration: as it was: {refit.trouble}", style="dim"), soft_wrap=True)
        return
    for fit in refit.answer.fits:
        before, after = median_error(fit.result.before), median_error(fit.result.after)
        text = f"calibration of {fit.device}: median error of {len(fit.observed)} plans {before:.1%} before"
        text += f", {after:.1%} after; written to {fit.path}" if fit.calibration else ", and no rate makes it smaller"
        console.print(Text(text), soft_wrap=True)


def tuning_as_dict(result: TuneResult) -> dict[str, Any]:
    """Return what `--json` prints about the trials."""
    not_tried = [
        _candidate_dict(each.candidate) | {"expected_seconds": each.seconds, "expected_sigma": each.sigma,
                                           "expected_gain": each.gain if each.gain < 1 else None,
                                           "why": result.stopped}
        for each in result.proposals
    ]  # fmt: skip
    not_tried += [_candidate_dict(each.candidate) | {"why": each.why} for each in result.left_out]
    return {
        "stopped": result.stopped,
        "why": result.why,
        "seconds": result.seconds,
        "new_trials": result.num_new,
        "gain": result.gain,
        "first": _tried_dict(result.first) if result.first else None,
        "best": _tried_dict(result.best) if result.best else None,
        "tried": [_tried_dict(each) for each in result.tried],
        "not_tried": not_tried,
    }


def _candidate_dict(candidate: TuneCandidate) -> dict[str, Any]:
    prediction = candidate.plan.prediction
    return {
        "key": candidate.key,
        "plan": candidate.plan.model_dump(mode="json"),
        "text": str(candidate.plan),
        "workers": candidate.workers,
        "origin": candidate.origin,
        "predicted": {"step_seconds": prediction.step_seconds, "peak_bytes": prediction.peak_bytes,
                      "error": prediction.error} if prediction else None,
    }  # fmt: skip


def _tried_dict(each: TriedCandidate) -> dict[str, Any]:
    figures = {"step_seconds": each.seconds, "relative_error": each.sigma, "steps": each.num_steps,
               "trials": each.num_trials, "peak_bytes": each.peak_bytes}  # fmt: skip
    return _candidate_dict(each.candidate) | {
        "outcome": each.outcome,
        "reason": each.reason,
        "measured": figures if each.seconds else None,
        "runs": list(each.runs),
    }


def _step(seconds: float | None) -> str:
    if not seconds:
        return ""
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def tune_here(
    request: TuneRequest, store: TrialStore, console: Console, *, minutes: float, min_gain: float | None, check: bool
) -> TuneResult:
    """Measure plans for `minutes`, or until less than `min_gain` is expected (None: the noise), or Ctrl-C."""
    # The run of the planner's first choice, for the checks that `train` makes.
    question, first = request.question, request.ranked[0]
    run = Request(
        recipe=request.recipe, spec=question.spec, outline=question.outline, cluster=question.cluster, plan=first
    )
    check_data(request.recipe)
    refuse_unusable(os.environ, kernels=question.cluster.device.traits.has_kernels)
    refuse_before_start(run)
    if check:
        from trimaran.app.machine.machine_check import refuse_unfit_machine

        refuse_unfit_machine(run)
    with progress_bar(console) as progress:
        recipe = prepare_data(request.recipe, progress, partial(print_plain, console))
    interrupting = handled_signals(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP)
    with TuneProgress(console, first) as view, _warm_fork_server() as warm, interrupting:

        def measure(candidate: TuneCandidate, limits: TrialLimits, /) -> MeasuredTrial:
            return run_trial(recipe, candidate, store.new_run(), limits, warm=warm, show=view.steps)

        task = TuneTask(
            question=question,
            recipe=recipe,
            ranked=request.ranked,
            minutes=minutes,
            min_gain=min_gain,
            free_workers="workers" not in question.recipe.data.model_fields_set,
        )
        return Tuner(task, store, measure, view).run()


def refit_rates(runs: list[Path], stopped: StopReason) -> Refit:
    """Fit the planner's rates to the trials of a complete tuning, and write them if predictions get better."""
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


@contextmanager
def _warm_fork_server() -> Iterator[bool]:
    """Start a fork server for the trials alone: the user's may have another environment. Yield whether it runs."""
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


def refuse_other_file(path: Path) -> None:
    """Raise, before anything is measured, if the file cannot be written, or exists and no tuning has written it."""
    try:
        exists = path.is_symlink() or path.exists()
        if exists and not read_regular_bytes(path, limit_bytes=MAX_HEADER_BYTES).startswith(HEADER.encode()):
            raise UserError("A026.file-exists-trimaran", where=str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UserError("A026.recipe-cannot-written", where=str(path), reason=error.strerror) from None


def tuned_recipe_text(recipe: Recipe, best: TuneCandidate, *, remark: str) -> str:
    """Return the fields that the user has set as YAML, with every field of the plan pinned."""
    data = {"workers": best.workers} if best.workers != recipe.data.workers else {}
    return pinned_recipe_text(recipe, best.plan, header=f"{HEADER}: {remark}", data=data)


def write_tuned_recipe(path: Path, text: str) -> None:
    """Write the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text, mode=0o644)
