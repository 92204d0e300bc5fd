"""The policy of the autopilot: the built-in one, or a plug-in's within the same limits."""

import logging
from dataclasses import replace
from typing import Protocol

from trimaran.autopilot.policy import MAX_ADVISED, Situation, advise, decide, price, why_not
from trimaran.autopilot.proposal import Proposal, undo_of
from trimaran.core import AutopilotSection, UserError
from trimaran.core.plugins import KINDS, load_plugin

log = logging.getLogger(__name__)


class AutopilotPolicy(Protocol):
    """The contract of an autopilot policy, version 1."""

    contract: int

    def choose(self, situation: Situation) -> Proposal | None:
        """Return the change to make, one of `situation.proposals` or another; None to leave the run as it is."""
        ...


def choose_change(section: AutopilotSection, situation: Situation) -> Proposal | None:
    """Return the change that the recipe's policy wants to try, or to advise; None if it wants none, or may not."""
    acts = section.mode == "act"
    if section.policy in KINDS["autopilot policy"].reserved:
        return decide(situation) if acts else advise(situation)
    try:
        chosen = load_plugin("autopilot policy", section.policy).choose(situation)
    except UserError as error:
        log.warning("the autopilot does nothing: %s", error.what)
        return None
    except Exception as error:  # a plug-in may raise anything
        log.warning("the policy %s failed: %s: %s", section.policy, type(error).__name__, error)
        return None
    if chosen is None:
        return None
    undo = undo_of(chosen.patch, situation.settings) if isinstance(chosen, Proposal) else None
    if undo is None or (why := _refusal(chosen, situation, acts=acts)) is not None:
        reason = why if undo is not None else "it is no Proposal, or its patch names a field that a run does not have"
        log.warning("the change that the policy %s chose is not made: %s", section.policy, reason)
        return None
    return replace(chosen, undo=undo, reason=f"policy {section.policy}: {chosen.reason}")


def _refusal(chosen: Proposal, situation: Situation, *, acts: bool) -> str | None:
    """Return which limit of the recipe forbids the change: a pinned field, memory, the course, the budget."""
    if (why := why_not(chosen, situation)) is not None:
        return why
    left = situation.budget_seconds - situation.spent_seconds
    if acts and not chosen.saves_memory and price(chosen, situation).worst_cost > left:
        return "a trial of it would exceed the budget"
    if not acts and sum(each.outcome == "advised" for each in situation.decisions) >= MAX_ADVISED:
        return "enough advice waits for a person"
    return None
