"""The phases of a change of the plan while a run runs. A drill can have a rank killed at each of them."""

import json
import os
import signal
from typing import Literal, get_args

from trimaran.core.regular_files import read_regular_bytes, write_atomically
from trimaran.runs.run_directory import RunDirectory, writing

ChangePhase = Literal["copy", "build", "hand-over", "release", "step", "commit", "files", "switch", "answer"]
"""Where a rank is in a change, in this order:

- `copy`: before the state is copied to memory
- `build`: the new networks exist, without values
- `hand-over`: half of the new tensors have their values
- `release`: the old state is freed
- `step`: the first step under the new plan is done, and no other rank knows yet
- `commit`: all ranks know it, and no file of the run directory has changed
- `files`: plan.json is new, and recipe.yaml is not
- `switch`: this rank has written the files, if that is its task, and still saves the state of the old plan
- `answer`: this rank saves the state of the new plan, and the request is not answered
"""
CHANGE_PHASES: tuple[ChangePhase, ...] = get_args(ChangePhase)
MAX_BYTES = 1 << 10


def request_kill(run: RunDirectory, rank: int, phase: ChangePhase) -> None:
    """Have `rank` kill itself once it reaches `phase` of a change, with SIGKILL."""
    with writing(run):
        write_atomically(run.kill_request, json.dumps({"rank": rank, "phase": phase}))


def reach_phase(run: RunDirectory, rank: int, phase: ChangePhase) -> None:
    """Die here if a drill asks for it, once. Every rank calls it at every phase of a change."""
    try:
        asked = json.loads(read_regular_bytes(run.kill_request, limit_bytes=MAX_BYTES))
    except (OSError, ValueError):
        return
    if asked == {"rank": rank, "phase": phase}:
        run.kill_request.unlink(missing_ok=True)
        os.kill(os.getpid(), signal.SIGKILL)
