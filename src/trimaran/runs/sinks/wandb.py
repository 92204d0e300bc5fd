"""Logs a run to Weights & Biases, online or to `wandb/` in the run directory for a later upload."""

import wandb

from trimaran.core import TelemetrySection, WandbSection
from trimaran.runs.read.ledger import time_scalars
from trimaran.runs.run_directory import RunDirectory
from trimaran.runs.sinks.scalar_sink import ScalarSink, scalars
from trimaran.runs.sinks.sink import Line, run_id, run_settings

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


class WandbSink(ScalarSink):
    """Logs each line as one row, with `step` as the x axis of every chart.

    A resumed run continues the same W&B run. Code, console output and wandb's own machine statistics are off; samples
    are logged instead.
    """

    name = "wandb"

    def __init__(self, run: RunDirectory, section: WandbSection) -> None:
        super().__init__(run)
        self._directory, self._section = run, section
        self._opened: wandb.Run | None = None

    def event(self, line: Line) -> None:
        if line["kind"] == "evaluation":
            self.log({f"evaluation/{name}": value for name, value in scalars(line.get("data", {})).items()}, line)

    def report(self, incident: Line, what: str) -> None:
        """Put the incident into the run's summary, and send an alert for serious causes."""
        run = self._opened_run()
        run.summary["last_incident"] = what
        if incident.get("cause") in ALERT_CAUSES:
            run.alert(title=f"{incident['id']} of {self._directory.path.name}", text=what)

    def close(self) -> None:
        self.log_held()
        if self._opened is not None:
            self.log(time_scalars(self.ledger.read()), {})
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

    def log(self, values: dict[str, float], line: Line) -> None:
        self._opened_run().log({"step": self.last_step} | values)


def open_sink(telemetry: TelemetrySection, run: RunDirectory) -> WandbSink:
    return WandbSink(run, telemetry.wandb)
