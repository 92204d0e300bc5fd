"""Which plan: what can run, what fits, and why. Imports no torch."""

from trimaran.planner.bulk import predict_line
from trimaran.planner.choose import choose
from trimaran.planner.explain import explain
from trimaran.planner.legal import check_plan
from trimaran.planner.question import GOALS, Answer, Goal, Miss, Question
from trimaran.planner.search import search

__all__ = ["GOALS", "Answer", "Goal", "Miss", "Question", "check_plan", "choose", "explain", "predict_line", "search"]
