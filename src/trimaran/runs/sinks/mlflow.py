"""Logs a run to an MLflow tracking server."""

import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from mlflow.entities import Metric, Param, RunStatus, RunTag
from mlflow.tracking import MlflowClient

from trimaran.core import MlflowSection, TelemetrySection
from trimaran.runs.read.ledger import time_scalars
from trimaran.runs.run_directory import RunDirectory
from trimaran.runs.sinks.scalar_sink import ScalarSink, scalars
from trimaran.runs.sinks.sink import Line, run_id, run_settings

REFUSED = re.compile(r"[^\w\-. :/]")  # characters that the name of a metric must not have
IDENTITY_TAG = "trimaran.run_id"  # by which a resumed run finds its MLflow run
MAX_TEXT_CHARACTERS = 5000  # of a tag; parameters may have 6,000
MAX_METRICS, MAX_PARAMS = 1000, 100  # of one request
MAX_STEPS_PER_SECOND = 4  # a step is a request, which takes 6 ms here and more in the server
END_STATES = {"done": "FINISHED", "stop": "KILLED", "error": "FAILED"}


class MlflowSink(ScalarSink):
    """Logs each line as metrics of its step. A resumed run continues the same MLflow run."""

    name = "mlflow"

    def __init__(self, run: RunDirectory, section: MlflowSection) -> None:
        super().__init__(run, max_steps_per_second=MAX_STEPS_PER_SECOND)
        self._directory, self._section = run, section
        self._client = MlflowClient(tracking_uri=section.uri)
        self._run_id, self._state = "", ""

    def event(self, line: Line) -> None:
        kind, data = line["kind"], line.get("data", {})
        if kind == "evaluation":
            self.log({f"evaluation/{name}": value for name, value in scalars(data).items()}, line)
        if line.get("rank") == 0 and kind in ("start", *END_STATES):
            self._state = END_STATES.get(kind, "")
            self._set_tags({f"trimaran.{kind}": json.dumps({"attempt": line.get("attempt", 0)} | data)})

    def report(self, incident: Line, what: str) -> None:
        """Put the incident into a tag of its own, and into `trimaran.last_incident`."""
        self._set_tags({"trimaran.last_incident": what, f"trimaran.incident.{incident['id']}": what})

    def close(self) -> None:
        """Log what is left, and say how the run ended; one that continues elsewhere stays `RUNNING`."""
        self.log_held()
        if not self._run_id:
            return
        self.log(time_scalars(self.ledger.read()), {})
        if self._state:
            self._client.set_terminated(self._run_id, status=self._state)

    def _opened_run(self) -> str:
        """Return the id of the MLflow run, which is opened with the first line: the server may be unreachable."""
        if not self._run_id:
            named, identity = self._section.experiment, run_id(self._directory)
            known = self._client.get_experiment_by_name(named)
            experiment = known.experiment_id if known else self._client.create_experiment(named)
            found = self._client.search_runs([experiment], f"tags.`{IDENTITY_TAG}` = '{identity}'", max_results=1)
            if found:
                opened = found[0].info.run_id
                self._client.update_run(opened, status=RunStatus.to_string(RunStatus.RUNNING))
            else:
                name = self._directory.location.name
                new = self._client.create_run(experiment, tags={IDENTITY_TAG: identity}, run_name=name)
                opened = new.info.run_id
            # The recipe and the plan. MLflow never changes a parameter: what a resume has changed becomes a tag.
            params = self._client.get_run(opened).data.params
            settings = {name: text[:MAX_TEXT_CHARACTERS] for name, text in flat_settings(run_settings(self._directory))}
            new = [Param(name, text) for name, text in settings.items() if name not in params]
            for first in range(0, len(new), MAX_PARAMS):
                self._client.log_batch(opened, params=new[first : first + MAX_PARAMS])
            changed = {name: text for name, text in settings.items() if params.get(name, text) != text}
            if tags := [RunTag(f"trimaran.changed.{name}", text) for name, text in changed.items()]:
                self._client.log_batch(opened, tags=tags[:MAX_PARAMS])
            self._run_id = opened
        return self._run_id

    def log(self, values: dict[str, float], line: Line) -> None:
        when, step = int(1000 * line.get("time", time.time())), line.get("step") or self.last_step
        metrics = [Metric(REFUSED.sub("_", name), value, when, step) for name, value in values.items()]
        for first in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._opened_run(), metrics=metrics[first : first + MAX_METRICS])

    def _set_tags(self, tags: Mapping[str, str]) -> None:
        named = [RunTag(name, text[:MAX_TEXT_CHARACTERS]) for name, text in tags.items()]
        self._client.log_batch(self._opened_run(), tags=named)


def flat_settings(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings of a tree by their path, such as `recipe.train.steps`, each as text."""
    for name, value in tree.items():
        path = f"{above}.{name}" if above else str(name)
        if isinstance(value, Mapping) and value:
            yield from flat_settings(value, path)
        else:
            yield path, value if isinstance(value, str) else json.dumps(value)


def open_sink(telemetry: TelemetrySection, run: RunDirectory) -> MlflowSink:
    return MlflowSink(run, telemetry.mlflow)
