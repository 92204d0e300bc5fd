"""Runs one rank of a run, from joining the process group to the exit code."""

import logging
import os
import platform
import sys
import time
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trimaran.core import EXIT_AGAIN, EXIT_DONE, EXIT_USER, VERSION, UserError, plugin_records
from trimaran.data import LoaderFault
from trimaran.parallel import steps_of
from trimaran.runs import GLOO_NOISE, Journal, RunDirectory, find_refusal, says_connection_lost
from trimaran.train.agreement import StopRequest
from trimaran.train.build import build_worker_parts
from trimaran.train.change_file import ChangeFile
from trimaran.train.checkpointing.disk_saves import UnwrittenCheckpointError
from trimaran.train.end_run import end_run, end_without_saving, fail_numeric
from trimaran.train.features.table import features_of
from trimaran.train.metrics.step_clock import StartupTimer
from trimaran.train.plain_rank import PlainRank
from trimaran.train.process.heartbeat_thread import HeartbeatThread
from trimaran.train.process.rank_setup import RankInfo, agree_on_plugins, bind_cores
from trimaran.train.process.supervisor_link import NO_SUPERVISOR, SupervisorLink
from trimaran.train.steppers.engine import ENGINES

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
    rank = rank_of(run, rank_info, link)
    with (
        Journal(run, rank_info.rank, attempt=link.attempt, first_rank=rank.first_rank) as journal,
        HeartbeatThread(run, rank_info.rank, link),
    ):
        change_file = ChangeFile(run, journal, environment or {})
        try:
            code, not_done = _train_rank(rank, journal, cache, stop, change_file)
        except UnwrittenCheckpointError as error:
            journal.event("error", cause="storage", **error.as_dict())
            return EXIT_AGAIN
        except UserError as error:
            journal.event("error", **error.as_dict())
            return EXIT_USER
        except Exception as error:
            found = find_refusal(run, rank_info.rank, since=started) if says_connection_lost(error) else None
            if found is not None:  # this rank only lost the connection to a rank that reported a user's mistake
                other, mistake = found
                lost = GLOO_NOISE.sub("", str(error).strip().partition("\n")[0])[:200]
                message = (
                    f"rank {rank_info.rank} ended because rank {other} did: {mistake['code']}: {mistake['what']} "
                    f"(this rank only lost the connection to it: {lost})"
                )
                journal.event("error", type="RankLost", message=message)
                sys.stderr.write(f"{message}\n")
                return EXIT_USER
            facts: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
            if isinstance(error, LoaderFault):
                facts |= {"cause": "data", "sample_ids": error.sample_ids}
            journal.event("error", **facts)
            traceback.print_exc(file=sys.stderr)
            return 1
        link.report_section("close", link.heartbeat.step if link.heartbeat else 0)
        if not not_done:  # after a failure the other ranks may be in a collective, and closing would wait for them
            # Leave the process group. Once the run is done, an error is only logged.
            try:
                dist.destroy_process_group()
            except Exception:
                if code != EXIT_DONE:
                    raise
                log.exception("the run is done, but the process group could not be closed")
    return code


def rank_of(run: RunDirectory, rank_info: RankInfo, link: SupervisorLink) -> PlainRank:
    try:
        plan = run.read_plan()
    except UserError:
        return PlainRank(run, rank_info, link)  # whoever needs the plan says why it cannot be read
    if not plan.is_elastic or plan.mesh.world_size != rank_info.world_size:
        return PlainRank(run, rank_info, link)
    from trimaran.train.features.elastic.elastic_loop import ElasticRank  # noqa: PLC0415  few runs are elastic
    from trimaran.train.features.elastic.replica import replica_of  # noqa: PLC0415

    return ElasticRank(run, rank_info, link, replica_of(plan, rank_info.rank))


def import_for(run: RunDirectory) -> None:
    """Import what the ranks of a run import when they apply its plan."""
    plan, recipe = run.read_plan(), run.read_recipe()
    for _ in steps_of(plan):
        pass
    features_of(plan, recipe)
    import_module(ENGINES[plan.engine])
    if plan.mesh.pp > 1:
        import_module("trimaran.train.steppers.pipeline_stepper")
    if plan.is_elastic:
        import_module("trimaran.train.features.elastic.elastic_loop")


def _train_rank(
    rank: PlainRank, journal: Journal, cache: Path, stop: StopRequest, change_file: ChangeFile
) -> tuple[int, dict[str, str]]:
    """Return the exit code, and what was not done after training, with the reason; see `evaluate_and_sample`."""
    started, timer, recipe = time.monotonic(), StartupTimer(), rank.run.read_recipe()
    bound = bind_cores(rank.info.device) if rank.info.binds_cores else {}
    rank.join()
    timer.lap("join")
    here: dict[str, Any] = {"host": platform.node(), "pid": os.getpid(), "device": str(rank.info.device)}
    here |= bound | ({"fork_server": rank.link.note} if rank.link.note else {})
    here |= {"plugins": records} if (records := plugin_records(recipe)) else {}
    journal.event("start", world_size=rank.info.world_size, version=VERSION, **here)
    agree_on_plugins(recipe)
    parts = build_worker_parts(rank.context(journal, cache, stop, change_file))
    timer.lap("build")
    training = rank.begin(parts, stop, change_file)
    timer.lap("keep")
    phases = {"join": timer.seconds["join"], **parts.seconds, "keep": timer.seconds["keep"]}
    copies, seconds = training.checkpointer.copies.memory_facts(), time.monotonic() - started
    journal.event("ready", step=training.start, seconds=seconds, phases=phases, copies=copies)
    # With the step, whoever asked can tell which of its requests failed.
    change_file.drop("the ranks were started again before this change was made", step=training.start)
    del parts  # a change of the plan frees them
    loop_exit = training.run()
    if loop_exit.reason == "leave":
        return end_without_saving(journal, loop_exit, started)
    parts, checkpointer = training.parts, training.checkpointer
    if loop_exit.reason == "rewind":
        why = ", and there is no earlier state to restore"
        return fail_numeric(journal, checkpointer, loop_exit, why), {}
    change_file.drop("the run has ended", status="refused")
    rank.link.report_section("finish", loop_exit.step)
    if not training.saves_end():
        return end_without_saving(journal, loop_exit, started)
    return end_run(parts, checkpointer, loop_exit, started, training.report_saved)
