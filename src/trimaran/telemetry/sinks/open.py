"""The sinks that a recipe asks for."""

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from trimaran.core import TelemetrySection, UserError
from trimaran.run.run_directory import RunDirectory
from trimaran.telemetry.sinks.sink import Sink

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkKind:
    """A sort of sink. `field` of the recipe asks for it, when `is_wanted`; `package` of the extra does its work.

    The file `trimaran/telemetry/sinks/NAME.py` has `open_sink(telemetry, run)`, and is loaded only when wanted.
    """

    field: str
    is_wanted: Callable[[TelemetrySection], bool]
    package: str = ""
    extra: str = "metrics"


SINKS = {
    "prometheus": SinkKind(
        field="telemetry.prometheus.port",
        is_wanted=lambda telemetry: telemetry.prometheus.port > 0,
        package="prometheus_client",
    ),
    "tensorboard": SinkKind(
        field="telemetry.tensorboard", is_wanted=lambda telemetry: telemetry.tensorboard, package="tensorboard"
    ),
    "wandb": SinkKind(
        field="telemetry.wandb.mode", is_wanted=lambda telemetry: telemetry.wandb.mode != "off", package="wandb"
    ),
    "ecs": SinkKind(field="telemetry.ecs", is_wanted=lambda telemetry: telemetry.ecs),
    "otel": SinkKind(
        field="telemetry.otel",
        is_wanted=lambda telemetry: bool(telemetry.otel),
        package="opentelemetry.exporter.otlp.proto.http",
        extra="otel",
    ),
}


def refuse_missing_sinks(telemetry: TelemetrySection) -> None:
    """Raise when a sink that the recipe asks for needs a package which is not installed. Nothing of it is imported."""
    for name, kind in SINKS.items():
        if kind.is_wanted(telemetry) and not _is_installed(kind.package):
            raise UserError("A018", f"{name} needs the package '{kind.package}', which is not installed",
                            where=kind.field, fix=f"pip install 'trimaran[{kind.extra}]', or leave it out")  # fmt: skip


def open_sinks(telemetry: TelemetrySection, run: RunDirectory) -> list[Sink]:
    """Return the sinks that the recipe asks for. One that cannot be opened is told and left out."""
    opened: list[Sink] = []
    for name, kind in SINKS.items():
        if not kind.is_wanted(telemetry):
            continue
        try:
            module = importlib.import_module(f"trimaran.telemetry.sinks.{name}")
            opened.append(module.open_sink(telemetry, run))
        except Exception as error:  # whatever a library thinks of this machine, the other sinks are told
            log.warning("%s is not told: %s: %s", name, type(error).__name__, error)
    return opened


def _is_installed(package: str) -> bool:
    """Return whether `package` could be imported. The parents of a dotted name are, which for namespaces is cheap."""
    try:
        return not package or find_spec(package) is not None
    except ModuleNotFoundError:
        return False
