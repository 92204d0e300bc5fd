"""`python -m trimaran.launch RUN`: the supervisor of a run, from the lease to the exit code.

With `--nodes` it is that of one node of several, see `fleet`.

Exit codes: 0 done; 2 a person's mistake; 75 stopped with a complete checkpoint, start me again; 93 no progress, do not
start me again; 130 or 131 ended at once, by a second SIGINT or by SIGQUIT; others are faults.
"""

import argparse
import logging
import os
import sys
from pathlib import Path

from trimaran.launch.signals import Signals

SIGNALS = Signals()
if __name__ == "__main__":
    SIGNALS.listen()  # a scheduler may think better of it while the rest is imported

from trimaran.core import EXIT_USER, Plan, Recipe, UserError  # noqa: E402
from trimaran.hardware import Cluster  # noqa: E402
from trimaran.launch.local import worker_environment  # noqa: E402
from trimaran.launch.local_fleet import LocalNodeGroup  # noqa: E402
from trimaran.launch.local_node import LocalNode  # noqa: E402
from trimaran.launch.multi_node import run_with_others  # noqa: E402
from trimaran.launch.node_options import add_flags, node_options_of  # noqa: E402
from trimaran.launch.preflight_process import PreflightProcess  # noqa: E402
from trimaran.launch.replan import cluster_of  # noqa: E402
from trimaran.launch.supervisor import Supervisor, lost_supervisor  # noqa: E402
from trimaran.run import RunDirectory, last_step, open_run  # noqa: E402
from trimaran.run.compile_cache import refuse_unusable  # noqa: E402
from trimaran.run.lease import take  # noqa: E402


def main(signals: Signals) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    parser = argparse.ArgumentParser(prog="python -m trimaran.launch", description="Run a run on this machine.")
    parser.add_argument("run", type=Path, help="a run directory")
    add_flags(parser)
    flags = parser.parse_args()
    try:
        refuse_unusable(os.environ)
        run, node_options = open_run(flags.run), node_options_of(flags)
        check = not flags.no_check
        if node_options is None:
            return run_here(run, signals, check=check)
        return run_with_others(run, node_options, signals, check=check)
    except UserError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return EXIT_USER


def run_here(run: RunDirectory, signals: Signals, *, check: bool = True) -> int:
    """Run `run` on this machine alone and return the exit code. With `check`, raise when it could not work here."""
    recipe, plan = run.read_recipe(), run.read_plan()
    cluster = cluster_of(recipe, plan.mesh.world_size)

    def environment(plan: Plan) -> dict[str, str]:
        on_cpu, deterministic = cluster.device.kind == "cpu", recipe.train.deterministic
        return worker_environment(os.environ, plan, on_cpu=on_cpu, deterministic=deterministic)

    with take(run) as lease:
        look = PreflightProcess(run, kind=cluster.device.kind) if check else None
        node = LocalNode(
            run,
            num_ranks=room_for(recipe, plan, cluster),
            environment=os.environ | environment(plan),
            faults=recipe.faults,
        )
        with LocalNodeGroup(run, lease, node, environment) as fleet:
            if look and (unfit := look.refusal()):
                raise unfit
            return Supervisor(run, fleet, signals, highest=last_step(run), loss=lost_supervisor(run)).supervise()


def room_for(recipe: Recipe, plan: Plan, cluster: Cluster) -> int:
    """Return how many ranks this machine is to hold at most: those of the plan, or what the recipe may want later."""
    now, most = plan.mesh.world_size, recipe.faults.ranks[1] if recipe.faults.ranks else 0
    return max(now, most if cluster.device.kind == "cpu" else min(most, cluster.devices_per_node))


if __name__ == "__main__":
    sys.exit(main(SIGNALS))
