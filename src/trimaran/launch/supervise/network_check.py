"""Checks whether the network between nodes is far slower than the plan's prediction."""

from collections import deque
from collections.abc import Sequence
from statistics import median

from trimaran.launch.supervise.attempt_watch import AttemptWatch
from trimaran.runs import IncidentLog, JsonlFollower, RunDirectory

NUM_STEPS = 5  # in a row; their median counts
MIN_FACTOR = 10.0  # of the predicted time
MIN_EXCESS_SECONDS = 0.2  # per step above the predicted time
MIN_STEP_FRACTION = 0.5  # of the step that communication takes


def is_below_plan(comm: Sequence[float], steps: Sequence[float], *, expected: float) -> bool:
    """Return whether communication takes far longer than `expected`. All in seconds per step."""
    if len(comm) < NUM_STEPS:
        return False
    usual = median(comm)
    is_slower = usual > MIN_FACTOR * expected and usual > expected + MIN_EXCESS_SECONDS
    return is_slower and usual > MIN_STEP_FRACTION * median(steps)


class NetworkCheck:
    """Reads the step metrics of one attempt on several nodes, and files one incident if the network is below plan."""

    def __init__(self, run: RunDirectory, log: IncidentLog, watch: AttemptWatch) -> None:
        self._run, self._log, self._watch = run, log, watch
        self._lines = JsonlFollower(run.metrics, backlog=0)
        self._comm: deque[float] = deque(maxlen=NUM_STEPS)
        self._steps: deque[float] = deque(maxlen=NUM_STEPS)
        self._num_changes = 0
        self._read_plan()
        self._done = len(watch.nodes) < 2 or run.read_plan().prediction is None

    def _read_plan(self) -> None:
        """Start over with the prediction of the run's plan."""
        prediction = self._run.read_plan().prediction
        self._expected = prediction.time.get("comm", 0.0) if prediction else 0.0
        self._comm.clear()
        self._steps.clear()

    def poll(self) -> None:
        if self._done:
            return
        if len(changes := self._watch.of_kind("change")) > self._num_changes:
            self._num_changes = len(changes)
            self._read_plan()
        for step in self._lines.new():
            self._comm.append(step["phases"].get("comm", 0.0))
            self._steps.append(step["step_seconds"])
        if is_below_plan(self._comm, self._steps, expected=self._expected):
            self._done = True
            self._log.notice(
                "network",
                f"the network is below plan: communication takes {median(self._comm):.2g} s per step, "
                f"{self._expected:.2g} s were predicted",
                attempt=self._watch.spec.attempt,
                step=self._watch.highest_step,
                action="continued",
                evidence={"comm_seconds": median(self._comm), "expected_seconds": self._expected},
            )
