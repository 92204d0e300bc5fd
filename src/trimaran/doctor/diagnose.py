"""Every rule asked, and the answers in the order in which a person should read them."""

import logging
from collections.abc import Iterator
from dataclasses import replace

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence, Rule
from trimaran.doctor.rules import health, speed

log = logging.getLogger(__name__)

WORST_FIRST = {"fault": 0, "warning": 1, "note": 2}


def diagnose(evidence: Evidence) -> list[Finding]:
    """Return what is wrong with the run: faults first, then what gains most. A healthy run gets none."""
    found = [finding for rule in (*health.RULES, *speed.RULES) for finding in _answers(rule, evidence)]
    return sorted(found, key=lambda each: (WORST_FIRST[each.severity], -(each.gain or 0.0), each.code))


def _answers(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Yield what a rule finds. One that stumbles over a strange file is told of, and the others still answer."""
    try:
        for finding in rule(evidence):
            yield finding if finding.step else replace(finding, step=evidence.last_step)
    except Exception:
        log.exception("the rule %s could not answer", getattr(rule, "__name__", rule))
