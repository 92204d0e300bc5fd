"""Diagnoses a run with every rule, and checks its targets."""

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from trimaran.core import Finding, UserError, installed_plugins, load, show_seconds
from trimaran.doctor.evidence import Evidence, Rule
from trimaran.doctor.rules import RULES
from trimaran.doctor.rules.communication import efficiency
from trimaran.doctor.step_breakdown import get_number, get_numbers, step_breakdown

log = logging.getLogger(__name__)

OUR_CODE = re.compile(r"[A-Z]\d{3}")
WORST_FIRST = {"fault": 0, "warning": 1, "note": 2}


def diagnose(evidence: Evidence) -> list[Finding]:
    """Return the findings of our rules and of installed ones: faults first, then by gain. A healthy run has none."""
    # An installed rule that does not load is a finding itself. Its codes must not look like ours, whose meaning is
    # documented.
    findings = [finding for rule in RULES for finding in _findings(rule, evidence)]
    for plugin in installed_plugins("doctor rule"):
        try:
            rule: Rule = load(plugin)
        except UserError as error:
            findings.append(Finding(code=error.code, severity="note", verdict=error.what, culprit=plugin.name,
                                    fix=error.fix, evidence={"where": error.where},
                                    step=evidence.last_step))  # fmt: skip
            continue
        for finding in _findings(rule, evidence):
            if OUR_CODE.fullmatch(finding.code):
                log.warning("the rule %s is left out: its code %s looks like Trimaran's", plugin.name, finding.code)
                break
            findings.append(finding)
    return sorted(findings, key=lambda each: (WORST_FIRST[each.severity], -(each.gain or 0.0), each.code))


def _findings(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Yield the findings of one rule. An exception, such as from a damaged file, is logged; other rules still run."""
    try:
        for finding in rule(evidence):
            yield finding if finding.step else replace(finding, step=evidence.last_step)
    except Exception as error:
        name = f"{rule.__module__.rpartition('.')[2]}.{getattr(rule, '__name__', type(rule).__name__)}"
        log.warning("the rule %s failed, a file of the run may be damaged: %s: %s", name, type(error).__name__, error)
        log.debug("the rule %s failed", name, exc_info=True)


RECOVERING_ACTIONS = ("restarted", "replanned", "resized", "rewound")
MAX_PLAUSIBLE_SECONDS = 24 * 3600.0  # a longer pause is a person's decision


class TargetCheck(NamedTuple):
    """A target of a run: the limit, what was measured (None: nothing), and why not."""

    name: str
    limit: float
    measured: float | None
    is_least: bool = False
    unit: str = "%"
    why: str = ""

    @property
    def is_met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured >= self.limit if self.is_least else self.measured <= self.limit

    def as_dict(self) -> dict[str, Any]:
        kind = "at least" if self.is_least else "at most"
        return {"name": self.name, kind.replace(" ", "_"): self.limit, "measured": self.measured, "met": self.is_met,
                "why": self.why}  # fmt: skip

    def __str__(self) -> str:
        limit = f"{'at least' if self.is_least else 'at most'} {self.show(self.limit)}"
        if self.measured is None:
            return f"{self.name}: not measured, {self.why} ({limit})"
        return f"{self.name}: {self.show(self.measured)} ({limit})"

    def show(self, value: float) -> str:
        return f"{value:.0%}" if self.unit == "%" else show_seconds(value)


def check_targets(evidence: Evidence) -> list[TargetCheck]:
    """Return all targets, whether they were measured or not."""
    limits, ranks = evidence.recipe.telemetry.targets, evidence.plan.mesh.world_size
    parts = step_breakdown(evidence)
    alone = "there is one rank" if ranks == 1 else "" if parts else "too few steps"
    exposed = parts.fraction("comm") if parts is not None and not alone else None
    scaling = efficiency(evidence) if not alone else None
    times = get_numbers(evidence.steps, "time")
    samples = [
        each for each in evidence.samples if times and times[0] <= (get_number(each, "time") or 0.0) <= times[-1]
    ]
    used = get_numbers((gpu for each in samples for gpu in each.get("gpus") or ()), "utilisation")
    busy = fmean(used) if used else None
    incidents = [each for each in evidence.incidents if each.get("action") in RECOVERING_ACTIONS]
    gaps = [
        after - at
        for at in get_numbers(incidents, "time")
        for before, after in pairwise(sorted(times))
        if before <= at < after
    ]
    recovery = max((each for each in gaps if each <= MAX_PLAUSIBLE_SECONDS), default=None)
    return [
        TargetCheck("GPU busy", limits.gpu_busy, busy, is_least=True, why="no GPU was sampled"),
        TargetCheck("exposed communication", limits.exposed_comm, exposed, why=alone),
        TargetCheck("scaling efficiency", limits.scaling, scaling, is_least=True, why=alone),
        TargetCheck("longest recovery", limits.recovery_seconds, recovery, unit="s", why="nothing failed"),
    ]
