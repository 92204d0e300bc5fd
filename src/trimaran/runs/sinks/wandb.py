"""Logs a run to Weights & Biases, online or to `wandb/` in the run directory for a later upload."""

import wandb

from trimaran.core import TelemetrySection
from trimaran.core.recipe import WandbSection
from trimaran.runs.run_directory import RunDirectory
from trimaran.runs.sinks.goodput import LedgerPoller, time_scalars
from trimaran.runs.sinks.rate_limit import RateLimit
from trimaran.runs.sinks.reported_incidents import ReportedIncidents
from trimaran.runs.sinks.run_identity import run_id, run_settings
from trimaran.runs.sinks.scalars import scalars
from trimaran.runs.sinks.sink import Line

ALERT_CAUSES = {"numeric", "hang", "oom", "crash", "storage"}

SETTINGS = wandb.Settings(
    console="off",
    disable_code=True,
    disable_git=True,
    disable_job_creation=True,
    init_timeout=30,
    silent=True,
    x_disable_machine_info=True,
    x_disable_stats=True,
    x_save_requirements=False,
)


class WandbSink:
    """Logs each line as one row, with `step` as the x axis of every chart.

    A resumed run continues the same W&B run. Code, console output and wandb's own machine statistics are off; samples
    are logged instead.
    """

    name = "wandb"

    def __init__(self, run: RunDirectory, section: WandbSection) -> None:
        self._directory, self._section = run, section
        self._reported = ReportedIncidents(run, self.name)
        self._rate_limit, self._ledger = RateLimit(), LedgerPoller(run)
        self._step = 0
        self._opened: wandb.Run | None = None

    def step(self, line: Line) -> None:
        self._step = line["step"]
        if self._rate_limit.passes(line):
            self._log(scalars(line) | time_scalars(self._ledger.poll()))

    def event(self, line: Line) -> None:
        if line["kind"] == "evaluation":
            self._log({f"evaluation/{name}": value for name, value in scalars(line.get("data", {})).items()})

    def incident(self, line: Line) -> None:
        """Put the incident into the run's summary, and send an alert for serious causes."""
        if not line.get("action") or self._reported.contains(line):
            return
        what = f"{line.get('cause')}: {line.get('what')}; {line['action']}"
        run = self._opened_run()
        run.summary["last_incident"] = what
        if line.get("cause") in ALERT_CAUSES:
            run.alert(title=f"{line['id']} of {self._directory.path.name}", text=what)
        self._reported.add(line)

    def sample(self, line: Line) -> None:
        node = line.get("node", 0)
        named = {f"node-{node}/{name}": value for name, value in scalars(line).items()}
        self._log(named | time_scalars(self._ledger.poll()))

    def close(self) -> None:
        if last := self._rate_limit.held:
            self._log(scalars(last))
        if self._opened is not None:
            self._log(time_scalars(self._ledger.read()))
            self._opened.finish()

    def _opened_run(self) -> wandb.Run:
        """Return the W&B run, which is opened with the first line, because an unreachable network takes a while."""
        if self._opened is None:
            section, run = self._section, self._directory
            self._opened = wandb.init(
                mode="online" if section.mode == "online" else "offline",
                project=section.project,
                entity=section.entity or None,
                dir=str(run.location),  # another process opens it
                name=run.location.name,
                id=run_id(run),
                resume="allow" if section.mode == "online" else None,
                config=run_settings(run),
                settings=SETTINGS,
            )
            self._opened.define_metric("step")
            self._opened.define_metric("*", step_metric="step")
        return self._opened

    def _log(self, values: dict[str, float]) -> None:
        self._opened_run().log({"step": self._step} | values)


def open_sink(telemetry: TelemetrySection, run: RunDirectory) -> WandbSink:
    return WandbSink(run, telemetry.wandb)
