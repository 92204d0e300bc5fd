"""Runs every rule on the evidence of a run and sorts the findings, most important first."""

import logging
import re
from collections.abc import Iterator
from dataclasses import replace

from trimaran.core import Finding, UserError
from trimaran.core.plugins import installed_plugins, load
from trimaran.doctor.evidence import Evidence, Rule
from trimaran.doctor.rules import RULES

log = logging.getLogger(__name__)

OUR_CODE = re.compile(r"[A-Z]\d{3}")
WORST_FIRST = {"fault": 0, "warning": 1, "note": 2}


def diagnose(evidence: Evidence) -> list[Finding]:
    """Return the findings: faults first, then by gain. A healthy run has none."""
    findings = [finding for rule in RULES for finding in _findings(rule, evidence)]
    findings += _findings_of_plugins(evidence)
    return sorted(findings, key=lambda each: (WORST_FIRST[each.severity], -(each.gain or 0.0), each.code))


def _findings_of_plugins(evidence: Evidence) -> Iterator[Finding]:
    """Yield the findings of all installed rules. A rule that does not load is left out, and a finding itself.

    The codes of plug-ins must not look like ours, whose meaning is documented.
    """
    for plugin in installed_plugins("doctor rule"):
        try:
            rule: Rule = load(plugin)
        except UserError as error:
            yield Finding(code=error.code, severity="note", verdict=error.what, culprit=plugin.name, fix=error.fix,
                          evidence={"where": error.where}, step=evidence.last_step)  # fmt: skip
            continue
        for finding in _findings(rule, evidence):
            if OUR_CODE.fullmatch(finding.code):
                log.warning("the rule %s is left out: its code %s looks like Trimaran's", plugin.name, finding.code)
                break
            yield finding


def _findings(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Yield the findings of one rule. An exception, such as from a damaged file, is logged; other rules still run."""
    try:
        for finding in rule(evidence):
            yield finding if finding.step else replace(finding, step=evidence.last_step)
    except Exception as error:
        name = f"{rule.__module__.rpartition('.')[2]}.{getattr(rule, '__name__', type(rule).__name__)}"
        log.warning("the rule %s failed, a file of the run may be damaged: %s: %s", name, type(error).__name__, error)
        log.debug("the rule %s failed", name, exc_info=True)
