"""Opens the sinks that a recipe enables."""

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

from trimaran.core import TelemetrySection, UserError, load_plugin
from trimaran.runs.run_directory import RunDirectory
from trimaran.runs.sinks.sink import Sink

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkKind:
    """A kind of sink. The recipe's `field` enables it, see `is_enabled`; it needs `package`, part of `extra`.

    The module `trimaran.runs.sinks.NAME` has `open_sink(telemetry, run)`, and is only imported if enabled.
    """

    field: str
    is_enabled: Callable[[TelemetrySection], bool]
    package: str = ""
    extra: str = "metrics"


class SinkPlugin(Protocol):
    """The contract of a plug-in's sink, version 1."""

    contract: int

    def open(self, run: RunDirectory, options: Mapping[str, Any]) -> Sink:
        """Return the sink of a run, with its options of `telemetry.sinks`. It runs in the sidecar of node 0."""
        ...


SINKS = {
    "prometheus": SinkKind(
        field="telemetry.prometheus.port",
        is_enabled=lambda telemetry: telemetry.prometheus.port > 0,
        package="prometheus_client",
    ),
    "tensorboard": SinkKind(
        field="telemetry.tensorboard", is_enabled=lambda telemetry: telemetry.tensorboard, package="tensorboard"
    ),
    "wandb": SinkKind(
        field="telemetry.wandb.mode", is_enabled=lambda telemetry: telemetry.wandb.mode != "off", package="wandb"
    ),
    "mlflow": SinkKind(
        field="telemetry.mlflow.uri",
        is_enabled=lambda telemetry: bool(telemetry.mlflow.uri),
        package="mlflow",
        extra="mlflow",
    ),
    "ecs": SinkKind(field="telemetry.ecs", is_enabled=lambda telemetry: telemetry.ecs),
    "otel": SinkKind(
        field="telemetry.otel",
        is_enabled=lambda telemetry: bool(telemetry.otel),
        package="opentelemetry.exporter.otlp.proto.http",
        extra="otel",
    ),
}


def refuse_missing_sinks(telemetry: TelemetrySection) -> None:
    """Raise UserError if an enabled sink needs a package that is not installed, or is a plug-in that does not load.

    The package is not imported; a plug-in is.
    """
    for name in telemetry.sinks:
        load_plugin("sink", name)
    for name, kind in SINKS.items():
        if kind.is_enabled(telemetry) and not _is_installed(kind.package):
            raise UserError("A018.needs-package", where=kind.field, name=name, package=kind.package, extra=kind.extra)


def has_sinks(telemetry: TelemetrySection) -> bool:
    """Return whether any sink is enabled."""
    return bool(telemetry.sinks) or any(kind.is_enabled(telemetry) for kind in SINKS.values())


def open_sinks(telemetry: TelemetrySection, run: RunDirectory) -> list[Sink]:
    """Return the enabled sinks. A sink that cannot be opened is logged and skipped."""
    opened: list[Sink] = []
    for name in (*(name for name, kind in SINKS.items() if kind.is_enabled(telemetry)), *telemetry.sinks):
        try:
            if name in telemetry.sinks:
                opened.append(load_plugin("sink", name).open(run, telemetry.sinks[name]))
            else:
                opened.append(importlib.import_module(f"trimaran.runs.sinks.{name}").open_sink(telemetry, run))
        except Exception as error:  # a library may raise anything; the other sinks still open
            log.warning("cannot open sink %s: %s: %s", name, type(error).__name__, error)
    return opened


def _is_installed(package: str) -> bool:
    """Whether `package` can be imported. Only the parents of a dotted name are imported, cheap namespace packages."""
    try:
        return not package or find_spec(package) is not None
    except ModuleNotFoundError:
        return False
