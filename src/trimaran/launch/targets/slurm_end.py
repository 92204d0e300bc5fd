"""`python -m trimaran.launch.targets.slurm_end RUN`: with which exit code a Slurm job ends, and why.

The batch script asks when its supervisors have ended. The answer has two lines, the code and the reason. It is also
appended to `launch/slurm.jsonl` of the run, where it outlives Slurm's memory of the job.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.core import EXIT_AGAIN, EXIT_DONE, EXIT_STUCK, EXIT_USER, UserError
from trimaran.runs import RunDirectory, append_line, last_lines, last_step, open_run, read_attempts, read_json_lines

MAX_DEATHS = 3  # ends in a row without a new step, of which no supervisor could say why
MAX_REASON = 250  # characters
ENDS = "launch/slurm.jsonl"  # of the run
EVENT_BACKLOG_BYTES = 1 << 16
SINCE_SECONDS = 2.0  # clocks of nodes may differ a little
OUTCOME_OF_EVENT = {"done": EXIT_DONE, "stop": EXIT_AGAIN}
NAMES = {EXIT_DONE: "done", EXIT_AGAIN: "stopped with a checkpoint", EXIT_USER: "configuration error",
         EXIT_STUCK: "no progress, do not start it again"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a job ended: the code for the chain, and a sentence."""

    code: int
    reason: str


def find_end(run: RunDirectory, *, code: int, since: float) -> JobEnd:
    """Return how a job ended that began at `since` and whose step returned `code`."""
    # What the coordinator wrote counts. If there is nothing of it, the supervisors were killed, and another start may
    # help, unless that happened several times without a new step.
    known = read_attempts(run)
    lines = [json.loads(line) for line in last_lines(run.attempts, 5)] if known.over is not None else []
    times = [float(line.get("time", 0.0)) for line in lines if "over" in line]
    if known.over is not None and (times[-1] if times else 0.0) >= since - SINCE_SECONDS:
        return JobEnd(code=known.over, reason=known.why)
    for event in reversed(list(read_json_lines(run.events(0), backlog=EVENT_BACKLOG_BYTES))):
        if event.get("kind") in OUTCOME_OF_EVENT and float(event.get("time", 0.0)) >= since - SINCE_SECONDS:
            found = OUTCOME_OF_EVENT[event["kind"]]  # ranks of torchrun, which have no supervisor
            return JobEnd(code=found, reason=f"{NAMES[found]} at step {event.get('step', 0)}")
    if code in (EXIT_DONE, EXIT_AGAIN, EXIT_USER, EXIT_STUCK):
        return JobEnd(code=code, reason=f"{NAMES[code]}: see the output of the job")
    step, died = last_step(run), f"the step ended with exit code {code}, and no supervisor could say why"
    before = 0
    for line in reversed(read_ends(run)):
        if not line.get("died") or line.get("step") != step:
            break
        before += 1
    if before + 1 >= MAX_DEATHS:
        return JobEnd(code=EXIT_STUCK, reason=f"{died}, {before + 1} times without a new step")
    return JobEnd(code=EXIT_AGAIN, reason=f"{died}; it goes on from the newest state")


def read_ends(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the last ends of the run's jobs, the oldest first."""
    try:
        found = [json.loads(line) for line in last_lines(run.path / ENDS, 100)]
    except (OSError, ValueError):
        return []
    return [each for each in found if isinstance(each, dict)]


def record_end(run: RunDirectory, end: JobEnd, *, code: int, environ: Mapping[str, str]) -> None:
    path = run.path / ENDS
    path.parent.mkdir(exist_ok=True)
    record = {
        "job": environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID", ""),
        "restart": int(environ.get("SLURM_RESTART_COUNT") or 0),
        "nodes": environ.get("SLURM_JOB_NODELIST", ""),
        "step": last_step(run),
        "code": end.code,
        "reason": end.reason,
        "died": code not in (EXIT_DONE, EXIT_AGAIN, EXIT_USER, EXIT_STUCK) and end.code in (EXIT_AGAIN, EXIT_STUCK),
    }
    append_line(path, record, reserve=run.reserve)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trimaran.launch.targets.slurm_end", description=__doc__)
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--code", type=int, required=True, help="exit code of the job's step")
    parser.add_argument("--since", type=float, required=True, help="when the step began, in seconds since the epoch")
    parser.add_argument("--asked", default="", help="what the job was asked for: again, stop, or nothing")
    flags = parser.parse_args()
    try:
        run = open_run(flags.run)
    except UserError as error:
        print(f"{flags.code}\n{error.code}: {error.what}"[:MAX_REASON])  # noqa: T201
        return 0
    end = find_end(run, code=flags.code, since=flags.since)
    if end.code == EXIT_AGAIN and flags.asked == "stop":
        end = JobEnd(code=end.code, reason=f"stopped on request; {end.reason}")
    record_end(run, end, code=flags.code, environ=os.environ)
    reason = " ".join(end.reason.split())
    print(f"{end.code}\n{reason[:MAX_REASON]}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
