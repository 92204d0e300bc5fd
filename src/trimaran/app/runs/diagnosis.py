"""`trimaran doctor RUN`: what is wrong with a live or finished run, and the command that fixes it."""

import contextlib
import json
import os
import shlex
import time
from typing import TYPE_CHECKING, Any

import typer

from trimaran.app.recipe.options import find_run, path_argument, program_name
from trimaran.core import Finding, UserError
from trimaran.core.regular_files import write_atomically
from trimaran.runs import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from trimaran.doctor.targets import TargetCheck

STYLES = {"fault": "bold red", "warning": "bold yellow", "note": "bold"}


def diagnose_run(run: str, *, as_json: bool, against: str = "") -> int:
    """Print the findings about a run, write them to its findings.json, and return 0.

    `against` is a run of the same recipe on fewer ranks, if there is one.
    """
    from trimaran.doctor.diagnose import diagnose
    from trimaran.doctor.evidence import read_evidence
    from trimaran.doctor.targets import check_targets
    from trimaran.machine import calibration_folder

    directory, other = find_run(run), find_run(against) if against else None
    try:
        evidence = read_evidence(directory, calibrations=calibration_folder(os.environ), against=other)
    except UserError:
        raise  # a special file in place of one of the run's is an OSError too
    except (OSError, ValueError, KeyError) as error:
        raise UserError("A008", f"the run cannot be examined: {error}", where=str(directory.path),
                        fix="name a complete run directory of `trimaran train`") from None  # fmt: skip
    findings, targets = diagnose(evidence), check_targets(evidence)
    answer = {"time": time.time(), "step": evidence.last_step, "findings": [each.as_dict() for each in findings],
              "targets": [each.as_dict() for each in targets]}  # fmt: skip
    with contextlib.suppress(OSError):  # a read-only run can be diagnosed, too
        write_findings(directory, answer)
    if as_json:
        shown = [each.as_dict() | {"command": command_of(each, directory)} for each in findings]
        typer.echo(json.dumps(answer | {"findings": shown}))
    else:
        _print(findings, directory, steps=len(evidence.steps), last=evidence.last_step)
        _print_targets(targets)
    return 0


def command_of(finding: Finding, run: RunDirectory) -> str:
    """Return the command that trains the run's recipe with the finding's patch; empty if there is no patch."""
    from trimaran.doctor.predicted_gain import patch_settings

    if not finding.patch:
        return ""
    settings = [part for each in patch_settings(finding.patch) for part in ("--set", shlex.quote(each))]
    return " ".join([program_name(), "train", shlex.quote(path_argument(run.recipe)), *settings])


def write_findings(run: RunDirectory, answer: dict[str, Any]) -> None:
    """Write the findings atomically, for other programs."""
    write_atomically(run.findings, json.dumps(answer, indent=2) + "\n")


def _print(findings: list[Finding], run: RunDirectory, *, steps: int, last: int) -> None:
    from trimaran.app.show.clean_console import open_console

    console = open_console()
    for finding in findings:
        _print_one(console, finding, run)
    span = f"the last {steps} steps, up to step {last}" if steps else "a run without a finished step"
    console.print(f"{len(findings) or 'no'} finding{'s' * (len(findings) != 1)} in {span}", soft_wrap=True)


def _print_targets(targets: "Sequence[TargetCheck]") -> None:
    """Print the targets that were measured, each with whether it is met."""
    from rich.text import Text

    from trimaran.app.show.clean_console import open_console

    console = open_console()
    for each in targets:
        if each.is_met is not None:
            word, style = ("met   ", "green") if each.is_met else ("missed", "bold yellow")
            console.print(Text.assemble(("target ", ""), (word, style), f" {each}"), soft_wrap=True)


def _print_one(console: "Console", finding: Finding, run: RunDirectory) -> None:
    from rich.text import Text

    head = Text.assemble((f"{finding.code} {finding.severity}", STYLES[finding.severity]), f": {finding.verdict}")
    console.print(head, soft_wrap=True)
    effect = finding.expected_effect and f"{finding.expected_effect} (confidence {finding.confidence:.0%})"
    lines = {
        "cause": finding.culprit,
        "seen": ", ".join(f"{name} {_short(value)}" for name, value in finding.evidence.items()),
        "fix": command_of(finding, run),
        "or" if finding.patch else "fix": finding.fix,
        "expect": effect,
        "more": f"docs/codes/{finding.code}.md",
    }
    for name, text in lines.items():
        if text:
            console.print(Text(f"  {name + ':':<8}{text}"), soft_wrap=True)
    console.print()


def _short(value: Any) -> str:
    """Return a value of the evidence as short text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} {_short(each)}" for key, each in value.items()) + "}"
    return str(value)
