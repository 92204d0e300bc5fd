"""The doctor's findings about a run: `trimaran doctor RUN`, and a poller for the live view."""

import contextlib
import json
import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import typer

from trimaran.app.recipe.options import find_run, path_argument, program_name
from trimaran.core import Finding, UserError, write_atomically
from trimaran.runs import RunDirectory

STYLES = {"fault": "bold red", "warning": "bold yellow", "note": "bold"}


def diagnose_run(run: str, *, as_json: bool, against: str = "") -> int:
    """Print findings, also compared with a run `against` on fewer ranks; write findings.json, and return 0."""
    from trimaran.doctor import check_targets, diagnose, read_evidence
    from trimaran.machine import calibration_folder

    directory, other = find_run(run), find_run(against) if against else None
    try:
        evidence = read_evidence(directory, calibrations=calibration_folder(os.environ), against=other)
    except UserError:
        raise  # a special file in place of one of the run's is an OSError too
    except (OSError, ValueError, KeyError) as error:
        raise UserError("A008.run-cannot-examined", where=str(directory.path), error=error) from None
    findings, targets, last = diagnose(evidence), check_targets(evidence), evidence.last_step
    answer = {"time": time.time(), "step": last, "findings": [each.as_dict() for each in findings],
              "targets": [each.as_dict() for each in targets]}  # fmt: skip
    with contextlib.suppress(OSError):  # a read-only run can be diagnosed, too
        write_atomically(directory.findings, json.dumps(answer, indent=2) + "\n")
    if as_json:
        shown = [each.as_dict() | {"command": command_of(each, directory)} for each in findings]
        typer.echo(json.dumps(answer | {"findings": shown}))
        return 0
    from rich.text import Text

    from trimaran.app.show.clean_console import open_console

    console, steps = open_console(), len(evidence.steps)
    for finding in findings:
        head = Text.assemble((f"{finding.code} {finding.severity}", STYLES[finding.severity]), f": {finding.verdict}")
        console.print(head, soft_wrap=True)
        effect = finding.expected_effect and f"{finding.expected_effect} (confidence {finding.confidence:.0%})"
        lines = {
            "cause": finding.culprit,
            "seen": ", ".join(f"{name} {_short(value)}" for name, value in finding.evidence.items()),
            "fix": command_of(finding, directory),
            "or" if finding.patch else "fix": finding.fix,
            "expect": effect,
            "more": f"docs/codes/{finding.code}.md",
        }
        for name, text in lines.items():
            if text:
                console.print(Text(f"  {name + ':':<8}{text}"), soft_wrap=True)
        console.print()
    span = f"the last {steps} steps, up to step {last}" if steps else "a run without a finished step"
    console.print(f"{len(findings) or 'no'} finding{'s' * (len(findings) != 1)} in {span}", soft_wrap=True)
    for each in targets:
        if each.is_met is not None:
            word, style = ("met   ", "green") if each.is_met else ("missed", "bold yellow")
            console.print(Text.assemble("target ", (word, style), f" {each}"), soft_wrap=True)
    return 0


def command_of(finding: Finding, run: RunDirectory) -> str:
    """Return the command that trains the run's recipe with the finding's patch; empty if there is no patch."""
    from trimaran.doctor.predicted_gain import patch_settings

    if not finding.patch:
        return ""
    settings = [part for each in patch_settings(finding.patch) for part in ("--set", shlex.quote(each))]
    return " ".join([program_name(), "train", shlex.quote(path_argument(run.recipe)), *settings])


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} {_short(each)}" for key, each in value.items()) + "}"
    return str(value)


POLL_SECONDS = 10.0
MAX_CPU_FRACTION = 0.05  # of a core that polling may take from the ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinding:
    """A finding and the command that applies its patch; empty if no setting fixes it."""

    finding: Finding
    command: str

    def as_dict(self) -> dict[str, Any]:
        return self.finding.as_dict() | {"command": self.command}


class RunDiagnosis(NamedTuple):
    """The doctor's findings, its own error, if any, and the targets that were measured."""

    findings: list[RunFinding]
    error: str = ""
    targets: Sequence[dict[str, Any]] = ()


def read_findings(run: RunDirectory) -> RunDiagnosis:
    """Return what the doctor says. Its own error is part of the answer: it must not disturb the live view."""
    try:
        from trimaran.doctor import check_targets, diagnose, read_evidence
        from trimaran.machine import calibration_folder

        with _captured_warnings("trimaran.doctor") as warnings:
            evidence = read_evidence(run, calibrations=calibration_folder(os.environ))
            found, targets = diagnose(evidence), check_targets(evidence)
        measured = [each.as_dict() | {"text": str(each)} for each in targets if each.is_met is not None]
        findings = [RunFinding(finding=each, command=command_of(each, run)) for each in found]
        return RunDiagnosis(findings, "; ".join(warnings), measured)
    except Exception as error:
        return RunDiagnosis([], f"the doctor failed: {type(error).__name__}: {error}")


@contextmanager
def _captured_warnings(name: str) -> Iterator[list[str]]:
    """Yield the warnings and errors of a logger instead of printing them: repeated tracebacks would hide the run."""
    logger, messages = logging.getLogger(name), []

    def emit(record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        messages.append(record.getMessage() + (f": {type(error).__name__}: {error}" if error else ""))

    handler = logging.Handler(logging.WARNING)
    handler.emit = emit
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


class FindingsPoller:
    """Polls the doctor's findings about one run.

    It polls every ten seconds, or less often to use at most a twentieth of a core. It never raises: the process that
    shows a run may also be the one that started it. `read` asks the doctor.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        at_once: bool,
        read: Callable[[RunDirectory], RunDiagnosis] = read_findings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self._read, self._clock = run, read, clock
        self.findings: list[RunFinding] = []
        self.error = ""
        self.targets: Sequence[dict[str, Any]] = ()
        self._due = 0.0 if at_once else clock() + POLL_SECONDS
        self._shown: dict[tuple[str, str], bool] = {}  # by code and culprit: whether as a fault
        self._error_shown = False

    def poll(self) -> None:
        """Read the findings again if it is due."""
        began = self._clock()
        if began < self._due:
            return
        self.findings, self.error, self.targets = self._read(self.run)
        self._due = began + max(POLL_SECONDS, (self._clock() - began) / MAX_CPU_FRACTION)

    def new_findings(self) -> list[RunFinding]:
        """Return each finding once, by code and culprit, and again if it has become a fault."""
        new = []
        for each in self.findings:
            key, is_fault = (each.finding.code, each.finding.culprit), each.finding.severity == "fault"
            if key not in self._shown or (is_fault and not self._shown[key]):
                self._shown[key] = is_fault
                new.append(each)
        return new

    def new_error(self) -> str:
        """Return the doctor's own error the first time there is one; otherwise an empty string."""
        if not self.error or self._error_shown:
            return ""
        self._error_shown = True
        return self.error
