"""`python -m trimaran.doctor.node_check RUN`: the doctor's quick look at one node of a run; a JSON object on standard output.

What starts ranks asks for it with this command (`launch/preflight_process.py`), because it may not import the doctor.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from trimaran.core import UserError
from trimaran.doctor.preflight import HERE, look_before
from trimaran.run import open_run


def main() -> None:
    """Print what stands in the way of the run here, as an error's parts; an empty object where nothing does."""
    parser = argparse.ArgumentParser(
        prog="python -m trimaran.doctor.node_check", description="Look at a node before a run."
    )
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--kind", choices=("cpu", "cuda"), default="cpu", help="what the ranks compute on")
    parser.add_argument("--nodes", type=int, default=1, help="how many nodes share the ranks")
    parser.add_argument("--where", default=HERE, help="what to call this node")
    flags = parser.parse_args()
    found: dict[str, str] = {}
    try:
        plan = open_run(flags.run).read_plan()
        look_before(os.environ, plan, kind=flags.kind, nodes=flags.nodes, where=flags.where)
    except UserError as error:
        found = error.as_dict()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
