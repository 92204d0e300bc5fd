"""`python -m trimaran.launch RUN`: the supervisor of a run, from the lease to the exit code.

With `--nodes` it is the supervisor of one of several nodes, see `multi_node`. With `--create-from` the first of them
creates the run. With `--arguments-from` it reads its other arguments from a descriptor, see `early_supervisor`. It
starts the fork server, which takes longest, first of all.

Exit codes: 0 done; 2 configuration error; 75 stopped with a complete checkpoint, start it again; 93 no progress, do not
start it again; 130 or 131 ended at once by a second SIGINT or by SIGQUIT; others are faults.
"""

import argparse
import gc
import json
import logging
import os
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from trimaran.launch.supervise.early_supervisor import LATER, WARM, Signals, wait_for_arguments
from trimaran.launch.supervise.fork_server_process import ForkServerProcess, fork_warm_or_start, start_fork_server
from trimaran.runs import drop_unread_output, raise_soft_limits

SIGNALS = Signals()
EARLY_FORK_SERVER: ForkServerProcess | None = None
if __name__ == "__main__":
    SIGNALS.listen()  # before the imports: a scheduler may send SIGTERM while they run
    drop_unread_output()
    if "--help" not in sys.argv and "-h" not in sys.argv:
        EARLY_FORK_SERVER = (fork_warm_or_start if WARM in sys.argv else start_fork_server)(os.environ)
    gc.disable()  # imports leave little garbage, and looking for it takes a tenth of their time

from trimaran.core import EXIT_AGAIN, EXIT_USER, Plan, UserError, append_regular_file  # noqa: E402
from trimaran.launch.supervise.head_client import HeadClient, create_as_head_has_it  # noqa: E402
from trimaran.launch.supervise.local_node import LocalNode, LocalNodeGroup  # noqa: E402
from trimaran.launch.supervise.multi_node import run_on_several_nodes  # noqa: E402
from trimaran.launch.supervise.next_attempt import cluster_of  # noqa: E402
from trimaran.launch.supervise.node_options import (  # noqa: E402
    add_node_flags,
    given_token,
    keep_token,
    needed_token,
    parse_node_options,
    with_own_address,
)
from trimaran.launch.supervise.recovery_policy import EXIT_FAULT  # noqa: E402
from trimaran.launch.supervise.side_processes import PreflightProcess, autopilot_process  # noqa: E402
from trimaran.launch.supervise.supervisor import Supervisor, file_lost_supervisor  # noqa: E402
from trimaran.models.hub_files import restore_missing_files  # noqa: E402
from trimaran.runs import RunDirectory, last_step, open_run  # noqa: E402
from trimaran.runs.compile_cache import refuse_unusable  # noqa: E402
from trimaran.runs.held_directory import HeldDirectory, LostDirectoryError, report_lost_directory  # noqa: E402
from trimaran.runs.lease import take_lease  # noqa: E402
from trimaran.runs.rank_environment import worker_environment  # noqa: E402
from trimaran.runs.run_records import AttemptLog  # noqa: E402
from trimaran.runs.stored_settings import create_run_from  # noqa: E402


def main(signals: Signals, fork_server: ForkServerProcess | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    is_early = any(word.startswith(LATER) for word in sys.argv)
    parser = argparse.ArgumentParser(prog="python -m trimaran.launch", description="Run a run on this machine.")
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--error-descriptor", type=int, help="where to write a configuration error as a JSON object")
    parser.add_argument(WARM, action="store_true", help="use the user's warm fork server, or start one")
    parser.add_argument(
        "--create-from",
        type=Path,
        metavar="FOLDER",
        help="if there is no run yet, create it from FOLDER/recipe.yaml and FOLDER/plan.json; all nodes may do so",
    )
    add_node_flags(parser)
    flags = parser.parse_args(wait_for_arguments(sys.argv[1:]))
    raise_soft_limits()
    try:
        refuse_unusable(os.environ)
        node_options = parse_node_options(flags)
        if node_options is not None and node_options.own_disk:
            # The run is on this node's own disk, with the run's token. The head has the run, or creates it. The others
            # create theirs as the head has it, or compare it.
            node_options = with_own_address(node_options)
            token = given_token(os.environ, flags.token_file, is_head=node_options.is_head)
            run = create_run_from(flags.create_from, flags.run) if flags.create_from else None
            if node_options.is_head:
                run = run or open_run(flags.run)
            else:
                token = needed_token(token, RunDirectory(flags.run))
                client = HeadClient(node_options.head_address, token, node_options.name)
                answer = client.ask(signals, seconds=node_options.wait_seconds)
                if answer is None:  # the head cannot be reached
                    return EXIT_AGAIN
                run = create_as_head_has_it(flags.run, answer)
            keep_token(run, token)
        else:
            run = create_run_from(flags.create_from, flags.run) if flags.create_from else open_run(flags.run)
        held = HeldDirectory(run.path)
        if is_early:
            with append_regular_file(held.run.agent_log) as log:
                # Into the log, first what this process has printed to a file in memory so far.
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                with open("/proc/self/fd/2", "rb") as printed:
                    os.write(log.fileno(), printed.read())
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
        held.watch()
        options: dict[str, Any] = {"check": not flags.no_check, "fork_server": fork_server}
        restore_missing_files(held.run.read_recipe())
        with report_lost_directory(held):
            if node_options is not None:
                return run_on_several_nodes(held, with_own_address(node_options, held.run), signals, **options)
            is_shown = flags.error_descriptor is not None  # then its autopilot is in the process that shows it
            with nullcontext() if is_shown else autopilot_process(held.run, os.environ):
                return run_on_this_machine(held, signals, **options)
    except UserError as error:
        print(error, file=sys.stderr)  # noqa: T201
        if flags.error_descriptor is not None:
            os.write(flags.error_descriptor, json.dumps(error.as_dict()).encode())
        return EXIT_FAULT if isinstance(error, LostDirectoryError) else EXIT_USER


def run_on_this_machine(
    held: HeldDirectory, signals: Signals, *, check: bool = True, fork_server: ForkServerProcess | None = None
) -> int:
    """Run a run on this machine only and return its exit code. With `check`, raise if it cannot work here."""
    run = held.run
    recipe, plan = run.read_recipe(), run.read_plan()
    cluster = cluster_of(recipe, plan.mesh.world_size)

    def environment(plan: Plan) -> dict[str, str]:
        on_cpu, deterministic = cluster.device.traits.shares_cores, recipe.train.deterministic
        debug = recipe.faults.debug
        return worker_environment(os.environ, plan, on_cpu=on_cpu, deterministic=deterministic, debug=debug)

    # The most ranks that this machine may ever hold.
    num_ranks, most = plan.mesh.world_size, recipe.faults.ranks[1] if recipe.faults.ranks else 0
    num_ranks = max(num_ranks, most if cluster.device.traits.shares_cores else min(most, cluster.devices_per_node))
    with take_lease(run) as lease:
        preflight = PreflightProcess(run, kind=cluster.device.kind) if check else None
        node = LocalNode(
            run,
            num_ranks=num_ranks,
            environment=os.environ | environment(plan),
            faults=recipe.faults,
            fork_server=fork_server,
        )
        with closing(LocalNodeGroup(run, lease, node, environment)) as nodes:
            if preflight and (unfit := preflight.wait_for_error()):
                AttemptLog(run).over(EXIT_USER, f"{unfit.code}: {unfit.what}")
                raise unfit
            incident = file_lost_supervisor(run)
            known: dict[str, Any] = {"highest_step": last_step(run), "open_incident": incident}
            return Supervisor(run, nodes, signals, held=held, **known).supervise().code


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    sys.exit(main(SIGNALS, EARLY_FORK_SERVER))
