"""What the scripts of the local and ssh targets share: comments, the choice of an exit code, states of a job."""

import json

from trimaran.core import EXIT_AGAIN, EXIT_DONE
from trimaran.launch.supervise.detached import DetachedProcess
from trimaran.launch.targets.target import JobState

EXIT_UNREACHABLE = 69  # of a script that could reach no node; EX_UNAVAILABLE of sysexits.h
NO_CONNECTION = 255  # what ssh returns then
EXIT_CODES = """\
# Exit codes: 0 done; 2 a configuration error; 75 stopped with a checkpoint, start it again; 93 no progress, do not
# start it again; others are faults."""

# Shell functions. Nodes of a run normally end with the same code; one that was lost or refused may end with another.
SHARED_FUNCTIONS = r"""
# choose_code CODE...: the code of the run. 0 says that it is done. Codes that say not to start it again (93, 2) count
# more than 75, which says to do so, and that counts more than a fault. 255 says only that there was no connection.
choose_code() {
  local wanted code
  for wanted in 0 93 2 75; do
    for code in "$@"; do
      if [ "$code" -eq "$wanted" ]; then echo "$code"; return; fi
    done
  done
  for code in "$@"; do
    if [ "$code" -ne 255 ]; then echo "$code"; return; fi
  done
  echo 69
}

# with_prefix NAME: copies stdin to stdout, each line after [NAME] and at once; some versions of awk and sed wait.
with_prefix() {
  local line
  while IFS= read -r line || [ -n "$line" ]; do printf '[%s] %s\n' "$1" "$line"; done
}

# wait_for PID...: returns when all have ended; a signal that is trapped does not end it.
wait_for() {
  local pid
  for pid in "$@"; do
    while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done
  done
}
"""


def commented(text: str) -> str:
    """Return a user's text for a comment of a script: in one line and in ASCII."""
    return json.dumps(text)


def state_of_code(code: int, *, reason: str = "", nodes: tuple[str, ...] = ()) -> JobState:
    """Return the state of a job whose script or supervisors have ended with `code`."""
    state = "done" if code == EXIT_DONE else "stopped" if code == EXIT_AGAIN else "failed"
    return JobState(state=state, native=f"exit {code}", exit_code=code, reason=reason, nodes=nodes)


def state_of_process(process: DetachedProcess) -> JobState:
    """Return the state of a job whose script or driver is a process of this machine."""
    found = process.state()
    match found["state"]:
        case "running":
            return JobState(state="running", native=f"process {found['pid']}", nodes=(found["host"],))
        case "ended":
            return state_of_code(found["code"], reason=found.get("error", ""))
        case "lost":
            return JobState(state="failed", reason=f"process {found['pid']} is gone; the machine may have rebooted")
    return JobState(state="unknown", reason="it was not started here")
