"""Runs one rank of a run, from joining the process group to the exit code."""

import logging
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trimaran import __version__
from trimaran.checkpoint.export_hf import save_network
from trimaran.checkpoint.export_peft import AdapterFacts, save_adapter, whole_modules
from trimaran.core import EXIT_AGAIN, EXIT_DONE, EXIT_STUCK, EXIT_USER, UserError
from trimaran.core.recipe_plugins import plugin_records
from trimaran.data.loader import LoaderFault
from trimaran.infer.generate import save_tokenizer
from trimaran.models import model_folder
from trimaran.parallel.comm.json_exchange import broadcast_json
from trimaran.run import Journal, RunDirectory
from trimaran.run.connection_lost import GLOO_NOISE, find_refusal, says_connection_lost
from trimaran.run.held_directory import HeldDirectory
from trimaran.run.lease import take_lease
from trimaran.run.reserve import fill_reserve, remove_reserve
from trimaran.train.after_training import evaluate_and_sample, planned_parts
from trimaran.train.agreement import LoopExit, StopRequest
from trimaran.train.build import WorkerParts, build_worker_parts
from trimaran.train.change.apply_change import PlanChanger
from trimaran.train.change.change_file import ChangeFile
from trimaran.train.checkpointing.checkpointer import Checkpointer, UnwrittenCheckpointError
from trimaran.train.elastic.replica import Replica, check_replica, find_replica, join_replica
from trimaran.train.health.bad_sample_limit import too_many_bad_samples
from trimaran.train.metrics.step_clock import StartupTimer
from trimaran.train.process.agree_plugins import agree_on_plugins
from trimaran.train.process.bind_cores import bind_cores
from trimaran.train.process.heartbeat_thread import HeartbeatThread
from trimaran.train.process.rank_info import RankInfo, join_process_group
from trimaran.train.process.supervisor_link import NO_SUPERVISOR, SupervisorLink
from trimaran.train.process.torchrun_preflight import check_machines

log = logging.getLogger(__name__)


def run_worker(
    run: RunDirectory,
    rank_info: RankInfo,
    *,
    cache: Path,
    link: SupervisorLink = NO_SUPERVISOR,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Train one rank of `run` and return its exit code. Every exit writes an event.

    `environment` is that of the process, for the planner if another plan is requested while the run runs.
    """
    started = time.time()
    stop = StopRequest(run.stop_request if rank_info.rank == 0 else None)
    stop.listen()  # first of all: a stop may be requested while the parts are built
    replica = find_replica(run, rank_info)
    first_rank = replica.first_rank if replica else 0
    with (
        Journal(run, rank_info.rank, attempt=link.attempt, first_rank=first_rank) as journal,
        HeartbeatThread(run, rank_info.rank, link),
    ):
        change_file = ChangeFile(run, journal, environment or {})
        try:
            code, not_done = _train_rank(run, rank_info, journal, cache, link, stop, change_file, replica)
        except UnwrittenCheckpointError as error:
            journal.event("error", cause="storage", **error.as_dict())
            return EXIT_AGAIN
        except UserError as error:
            journal.event("error", **error.as_dict())
            return EXIT_USER
        except Exception as error:
            if (message := _refusal_of_other(run, rank_info, error, since=started)) is not None:
                journal.event("error", type="RankLost", message=message)
                sys.stderr.write(f"{message}\n")
                return EXIT_USER
            journal.event("error", type=type(error).__name__, message=str(error), **_error_cause(error))
            traceback.print_exc(file=sys.stderr)
            return 1
        link.report_section("close", link.heartbeat.step if link.heartbeat else 0)
        if not not_done:  # after a failure the other ranks may be in a collective, and closing would wait for them
            _close_process_group(code)
    return code


def _refusal_of_other(run: RunDirectory, rank_info: RankInfo, error: Exception, *, since: float) -> str | None:
    """Return what to say if this rank only lost the connection to a rank that reported a user's mistake; else None."""
    if not says_connection_lost(error) or (found := find_refusal(run, rank_info.rank, since=since)) is None:
        return None
    other, mistake = found
    lost = GLOO_NOISE.sub("", str(error).strip().partition("\n")[0])[:200]
    return (
        f"rank {rank_info.rank} ended because rank {other} did: {mistake['code']}: {mistake['what']} "
        f"(this rank only lost the connection to it: {lost})"
    )


def _close_process_group(code: int) -> None:
    """Leave the process group. Once the run is done, an error is only logged."""
    try:
        dist.destroy_process_group()
    except Exception:
        if code != EXIT_DONE:
            raise
        log.exception("the run is done, but the process group could not be closed")


@contextmanager
def open_torchrun_run(
    rank_info: RankInfo, make: Callable[[], RunDirectory], *, check: Callable[[], None] | None = None
) -> Iterator[tuple[RunDirectory, SupervisorLink]]:
    """Join the ranks that an outside torchrun started, and open on all of them the run that rank 0 makes or finds.

    Rank 0 holds the lease of the run, so that no other process can start it, and stops all ranks if the run directory
    is moved; there is no supervisor. `check` raises if the run cannot work on this machine, see `check_machines`.
    """
    store = check_machines(rank_info, check) if check else None
    join_process_group(rank_info)
    del store
    answer: dict[str, Any] = {}
    held: HeldDirectory | None = None
    with ExitStack() as lease_stack:
        if rank_info.rank == 0:
            try:
                held = HeldDirectory(make().path)
                answer = {"path": str(held.named), "term": lease_stack.enter_context(take_lease(held.run)).term}
                fill_reserve(held.run.reserve)
                lease_stack.callback(remove_reserve, held.run.reserve)
                held.watch(partial(_stop_in_moved_directory, held))
            except UserError as error:
                answer = error.as_dict()
        answer = broadcast_json(answer)
        if "code" in answer:
            raise UserError(answer["code"], answer["what"], where=answer["where"], fix=answer["fix"])
        held = held or HeldDirectory(Path(answer["path"]))
        yield held.run, SupervisorLink(term=answer["term"])


def _stop_in_moved_directory(held: HeldDirectory) -> None:
    """Stop all ranks as if the user had asked for it: the last checkpoint goes to where the directory is now."""
    log.error("%s; stopping", held.explain(held.place))
    os.kill(os.getpid(), signal.SIGTERM)


def _error_cause(error: Exception) -> dict[str, Any]:
    """Return the fields of the `error` event that tell the supervisor the cause."""
    return {"cause": "data", "sample_ids": error.sample_ids} if isinstance(error, LoaderFault) else {}


def _train_rank(
    run: RunDirectory,
    rank_info: RankInfo,
    journal: Journal,
    cache: Path,
    link: SupervisorLink,
    stop: StopRequest,
    change_file: ChangeFile,
    replica: Replica | None = None,
) -> tuple[int, dict[str, str]]:
    """Return the exit code, and what was not done after training, with the reason; see `evaluate_and_sample`."""
    started, timer, of_run = time.monotonic(), StartupTimer(), rank_info
    bound = bind_cores(rank_info.device) if rank_info.binds_cores else {}
    if replica is not None:
        check_replica(run.read_recipe(), link)
        rank_info, link = replica.rank_info(of_run), replace(link, rank_memories=())
        join_replica(replica, rank_info, link)
    elif not dist.is_initialized():
        join_process_group(rank_info, link)
    timer.lap("join")
    here: dict[str, Any] = {"host": platform.node(), "pid": os.getpid(), "device": str(rank_info.device)}
    here |= bound | ({"fork_server": link.note} if link.note else {})
    recipe = run.read_recipe()
    here |= {"plugins": records} if (records := plugin_records(recipe)) else {}
    journal.event("start", world_size=of_run.world_size, version=__version__, **here)
    agree_on_plugins(recipe)
    ask: dict[str, Any] = {"stop": stop, "change_requested": change_file.is_requested} if replica is None else {}
    parts = build_worker_parts(run, rank_info, journal, cache=cache, link=link, replica=replica, **ask)
    timer.lap("build")
    elastic = None
    if replica is not None:
        from trimaran.train.elastic.elastic_loop import build_elastic_loop  # noqa: PLC0415  only elastic runs use it

        elastic = build_elastic_loop(parts, replica, of_run.rank, stop, change_file)
    start = elastic.start() if elastic is not None else _resume(parts)
    timer.lap("keep")
    phases = {"join": timer.seconds["join"], **parts.seconds, "keep": timer.seconds["keep"]}
    copies = parts.trainer.checkpointer.copy_memory
    journal.event("ready", step=start, seconds=time.monotonic() - started, phases=phases, copies=copies)
    if start == 0 and elastic is None and recipe.model.family == "hf" and recipe.train.check_first_loss:
        _check_first_loss(parts)
    change_file.step = start  # so that whoever asked can tell which of its requests failed
    change_file.drop("the ranks were started again before this change was made")
    changer = PlanChanger(parts, change_file)
    del parts  # a change of the plan frees them
    loop_exit = elastic.run(start) if elastic is not None else _run_loop(changer, change_file, start)
    if loop_exit.reason == "leave":
        return _end_without_saving(journal, loop_exit, started)
    if loop_exit.reason == "rewind":
        checkpointer = changer.parts.trainer.checkpointer
        return _fail_numeric(journal, checkpointer, loop_exit, ", and there is no earlier state to restore"), {}
    change_file.drop("the run has ended", status="refused")
    link.report_section("finish", loop_exit.step)
    if elastic is not None and not elastic.saves_end():
        return _end_without_saving(journal, loop_exit, started)
    report_saved = elastic.membership.report_finished if elastic is not None else _report_nothing
    return _end_run(changer.parts, loop_exit, started, report_saved)


def _check_first_loss(parts: WorkerParts) -> None:
    """Raise UserError if the first loss of a Hugging Face model is not that of transformers."""
    from trimaran.train.health.first_loss import check_first_loss  # noqa: PLC0415  transformers takes seconds to import

    context, trainer, data = parts.context, parts.trainer, parts.training_data
    with context.link.section("load"):
        check_first_loss(
            context.recipe,
            context.plan,
            context.rank_info,
            networks=parts.networks,
            ranks=parts.ranks,
            stepper=trainer.stepper,
            objective=data.objective,
            feed=data.training(trainer.check.guard.quarantine.ids),
        )


def _resume(parts: WorkerParts) -> int:
    start = parts.trainer.checkpointer.resume()
    parts.context.journal.resume(start)
    return start


def _report_nothing() -> None:
    """Tell nobody: there are no other replicas that wait."""


def _end_run(
    parts: WorkerParts, loop_exit: LoopExit, started: float, report_saved: Callable[[], None]
) -> tuple[int, dict[str, str]]:
    """Save the end of training and do what follows it. `report_saved` is called once what must be saved is saved."""
    run, rank_info = parts.context.run, parts.context.rank_info
    journal, link = parts.context.journal, parts.context.link
    trainer, checkpointer = parts.trainer, parts.trainer.checkpointer
    not_saved = _save_last_checkpoint(parts, run, journal, rank_info, loop_exit) if loop_exit.weights_are_valid else ""
    if loop_exit.reason != "done":
        checkpointer.wait_until_uploaded(loop_exit.step)
    if loop_exit.reason == "stop":
        report_saved()
        journal.event("stop", step=loop_exit.step, reason="asked to stop")
        return EXIT_AGAIN, {}
    if loop_exit.reason == "numeric":
        return _fail_numeric(journal, checkpointer, loop_exit, not_saved), {}
    if loop_exit.reason == "data":
        raise too_many_bad_samples(trainer.check.guard.bad_samples, run, loop_exit.step)
    if trainer.recipe.train.save:
        _save_model(parts, run, journal, rank_info, loop_exit.step)
    # From here on nothing fails the run, and the supervisor does not restart it.
    journal.event("trained", step=loop_exit.step, next=planned_parts(parts))
    link.report_saved()
    report_saved()
    not_done = evaluate_and_sample(parts, journal, loop_exit.step)
    checkpointer.wait_until_uploaded(loop_exit.step)
    facts: dict[str, Any] = {"seconds": time.monotonic() - started, "kept": checkpointer.totals()}
    facts |= {"not_done": not_done} if not_done else {}
    journal.event("done", step=loop_exit.step, steps=loop_exit.step, **facts)
    return EXIT_DONE, not_done


def _end_without_saving(journal: Journal, loop_exit: LoopExit, started: float) -> tuple[int, dict[str, str]]:
    """End a rank of an elastic replica: another replica has saved the end of the run, or goes on."""
    if loop_exit.reason in ("stop", "leave"):
        reason = "asked to stop" if loop_exit.reason == "stop" else "this replica was asked to leave"
        journal.event("stop", step=loop_exit.step, reason=reason)
        return EXIT_AGAIN, {}
    journal.event("done", step=loop_exit.step, steps=loop_exit.step, seconds=time.monotonic() - started)
    return EXIT_DONE, {}


def _run_loop(changer: PlanChanger, change_file: ChangeFile, start: int) -> LoopExit:
    """Train from step `start` on, through rewinds and changes of the plan, and return the last exit.

    It is that of a rewind only if there is no state to rewind to.
    """
    journal = changer.parts.context.journal
    while True:
        change_file.watch(changer.parts.trainer.checkpointer)
        loop_exit = changer.parts.trainer.train(start)
        if loop_exit.reason == "change":
            loop_exit = changer.apply(loop_exit.step)
        if loop_exit.reason not in ("rewind", "pause"):
            return loop_exit
        start = loop_exit.step
        if loop_exit.reason == "rewind":
            if (restored := changer.parts.trainer.checkpointer.rewind(loop_exit)) is None:
                return loop_exit
            start = restored
            journal.event("rewind", step=loop_exit.step, to_step=start)
            journal.resume(start)


def _save_last_checkpoint(
    parts: WorkerParts, run: RunDirectory, journal: Journal, rank_info: RankInfo, loop_exit: LoopExit
) -> str:
    """Save the last checkpoint. After a numeric failure, return why it could not be saved instead of raising.

    The numeric failure is then the error to report.
    """
    try:
        parts.trainer.checkpointer.finish(loop_exit.step)
    except UserError as error:
        if loop_exit.reason == "numeric":
            return f"; {error.what}"
        if loop_exit.reason == "done" and parts.trainer.recipe.train.save:
            _try_save_model(parts, run, journal, rank_info, loop_exit.step)
        raise
    return ""


def _fail_numeric(journal: Journal, checkpointer: Checkpointer, loop_exit: LoopExit, why: str = "") -> int:
    """Write the `error` event of a numeric failure and return the exit code."""
    assert loop_exit.refusal is not None
    if not loop_exit.weights_are_valid:
        checkpointer.refuse_later_checkpoints(loop_exit.refusal.good_step)
    facts = loop_exit.refusal.as_dict() | {"step": loop_exit.step, "action": "stop"}
    message = f"training failed: {loop_exit.refusal.reason}{why}"
    journal.event("error", **facts, cause="numeric", type="Refused", message=message)
    return EXIT_STUCK


def _try_save_model(parts: WorkerParts, run: RunDirectory, journal: Journal, rank_info: RankInfo, step: int) -> None:
    """Save the weights after the last checkpoint could not be written: they need less space than a checkpoint."""
    try:
        _save_model(parts, run, journal, rank_info, step)
    except UserError as error:
        log.warning("the weights could not be saved either: %s", error)


def _save_model(parts: WorkerParts, run: RunDirectory, journal: Journal, rank_info: RankInfo, step: int) -> None:
    """Save the trained weights; of a run with an adapter only the adapter, as a PEFT folder."""
    started, section = time.monotonic(), parts.trainer.recipe.model
    with parts.trainer.link.section("export", step) as report_progress:
        where: dict[str, Any] = {"rank": rank_info.rank, "stages": parts.stages, "report_progress": report_progress}
        add_files = partial(save_tokenizer, parts.training_data.tokenizer)
        if (base := parts.base) is not None:

            def facts() -> AdapterFacts:
                modules = whole_modules(section, parts.networks[0])
                return AdapterFacts(section=section, base=base.hashing.wait(report_progress), modules=modules)

            save_adapter(parts.networks, run.model, facts, add_files=add_files, **where)
        else:
            origin = model_folder(section.path) if section.path else None
            save_network(parts.networks, run.model, origin=origin, add_files=add_files, **where)
    kind = {"adapter": section.adapter.kind} if section.adapter else {}
    journal.event("saved", step=step, path=str(run.model), seconds=time.monotonic() - started, **kind)
