"""Which plan: what can run, what fits, and why. Imports no torch."""

from trimaran.planner.choose import choose
from trimaran.planner.explain import explain
from trimaran.planner.legal import check_plan

__all__ = ["check_plan", "choose", "explain"]
