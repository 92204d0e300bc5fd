"""`python -m trimaran.doctor.node_check RUN`: the preflight check of one node of a run, as a JSON object on stdout.

The supervisor starts it (`launch/supervise/side_processes.py`): `launch` may not import `doctor`.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from trimaran.core import UserError
from trimaran.machine import THIS_MACHINE, check_before_run
from trimaran.runs import open_run


def main() -> None:
    """Print why the run cannot work on this machine, as the fields of a `UserError`; an empty object if it can."""
    parser = argparse.ArgumentParser(
        prog="python -m trimaran.doctor.node_check", description="Check a node before a run."
    )
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--kind", choices=("cpu", "cuda"), default="cpu", help="device kind of the ranks")
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes of the run")
    parser.add_argument("--where", default=THIS_MACHINE, help="name of this node in messages")
    flags = parser.parse_args()
    result: dict[str, str] = {}
    try:
        plan = open_run(flags.run).read_plan()
        check_before_run(os.environ, plan, kind=flags.kind, nodes=flags.nodes, where=flags.where)
    except UserError as error:
        result = error.as_dict()
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
