"""The planner: which plans can run, which fit, and which is best. Imports no torch."""

from trimaran.planner.choose import choose
from trimaran.planner.explain import explain
from trimaran.planner.legal import check_plan
from trimaran.planner.predict_bulk import predict_line
from trimaran.planner.question import GOALS, Goal, NearMiss, PlanAnswer, Question
from trimaran.planner.search import search

__all__ = [
    "GOALS",
    "Goal",
    "NearMiss",
    "PlanAnswer",
    "Question",
    "check_plan",
    "choose",
    "explain",
    "predict_line",
    "search",
]
