"""Whether the network between nodes keeps up with the plan: communication as it is, beside what was predicted."""

from collections import deque
from collections.abc import Sequence
from statistics import median

from trimaran.launch.attempt_watch import AttemptWatch
from trimaran.run import Follower, IncidentLog, RunDirectory

STEPS = 5  # in a row, of which the middle one counts
FACTOR = 10.0  # times what was predicted
LEAST_SECONDS = 0.2  # a step, more than predicted
LEAST_PART = 0.5  # of the step


def below_plan(comm: Sequence[float], steps: Sequence[float], *, expected: float) -> bool:
    """Whether communication takes so much longer than `expected` that the plan is wrong. All in seconds per step."""
    if len(comm) < STEPS:
        return False
    usual = median(comm)
    return usual > FACTOR * expected and usual > expected + LEAST_SECONDS and usual > LEAST_PART * median(steps)


class NetworkCheck:
    """Looks at the steps of one attempt on several nodes, and files it once when the network is below the plan."""

    def __init__(self, run: RunDirectory, log: IncidentLog, watch: AttemptWatch) -> None:
        self._log, self._watch = log, watch
        self._lines = Follower(run.metrics, backlog=0)
        prediction = run.read_plan().prediction
        self._expected = prediction.time.get("comm", 0.0) if prediction else 0.0
        self._comm: deque[float] = deque(maxlen=STEPS)
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._done = len(watch.nodes) < 2 or prediction is None

    def look(self) -> None:
        if self._done:
            return
        for step in self._lines.new():
            self._comm.append(step["phases"].get("comm", 0.0))
            self._steps.append(step["step_seconds"])
        if below_plan(self._comm, self._steps, expected=self._expected):
            self._done = True
            self._log.notice(
                "network",
                f"the network is below plan: communication takes {median(self._comm):.2g} s a step, "
                f"{self._expected:.2g} s were expected",
                attempt=self._watch.orders.attempt,
                step=self._watch.highest,
                action="continued",
                evidence={"comm_seconds": median(self._comm), "expected_seconds": self._expected},
            )
