"""Reads what `trimaran viz` is asked about: a plan, a run, or the built-in example."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from trimaran.app.request.options import find_run
from trimaran.app.request.simulate_request import read_simulate_request
from trimaran.core import UserError
from trimaran.run import RunDirectory
from trimaran.run.journal import parse_lines
from trimaran.run.lines_from_end import last_lines
from trimaran.viz import RunMedians, Subject

EXAMPLE = {"what": "llama-3.1-8b", "cluster": "2x8xH100"}
MEASURED_STEPS = 100  # whose medians are shown


def read_subject(
    plan: str | None, run: str | None, cluster: str | None, settings: Sequence[str], controls: Sequence[str]
) -> Subject:
    """Return what the view is about. Without a plan and a run, that is an 8B model on 16 GPUs."""
    if plan is not None and run is not None:
        raise UserError("V004", "a view is of a plan or of a run, not of both", where="--plan, --run",
                        fix="leave one of them out")  # fmt: skip
    directory = find_run(run) if run is not None else None
    what = str(directory.path) if directory is not None else plan
    if what is None and not settings:
        what, cluster = EXAMPLE["what"], cluster or EXAMPLE["cluster"]
    request = read_simulate_request(what, {"cluster": cluster}, settings)
    measured = _measured(directory) if directory is not None else None
    return Subject(
        question=request.question,
        cluster=request.cluster,
        plan=request.plan,
        run=measured,
        settings=dict(map(_pair, controls)),
    )


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise UserError("V002", f"'{text[:60]}' is not CONTROL=VALUE", where="--with", fix="--with ranks=4")
    return name.strip(), value.strip()


def _measured(run: RunDirectory) -> RunMedians | None:
    """Return what the run's last steps have measured; None before its first step."""
    lines = [each for each in parse_lines(last_lines(run.metrics, MEASURED_STEPS)) if each.get("step_seconds")]
    if not lines:
        return None
    return RunMedians(
        name=run.path.name,
        steps=int(lines[-1]["step"]),
        step_seconds=median(each["step_seconds"] for each in lines),
        peak_bytes=max(_peak(each) for each in lines),
        phases=_medians(lines, "phases"),
        comm_seconds=_medians(lines, "comm_seconds"),
        **_stages(lines),
    )


def _stages(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the newest times of the stages of a pipeline, which not every step has."""
    found = [bubble for line in lines if isinstance(bubble := line.get("bubble"), dict) and bubble.get("stage_seconds")]
    return {name: tuple(found[-1][name]) for name in ("stage_seconds", "stage_layers")} if found else {}


def _peak(line: Mapping[str, Any]) -> float:
    ranks = line.get("ranks") or {}
    return float(max(line.get("peak_bytes") or 0, (ranks.get("peak_bytes") or {}).get("max") or 0))


def _medians(lines: Sequence[Mapping[str, Any]], field: str) -> dict[str, float]:
    names = dict.fromkeys(name for line in lines for name in line.get(field) or {})
    found = {name: [value for line in lines if (value := (line.get(field) or {}).get(name)) is not None]
             for name in names}  # fmt: skip
    return {name: median(values) for name, values in found.items() if values}
