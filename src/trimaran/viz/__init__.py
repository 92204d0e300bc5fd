"""Pictures that explain how a model is split: what each consists of, computed from the cost model. Imports no torch.

Read in this order: `figures` (what a view consists of), `subject` (what it is about), `catalogue` (all views by name),
then one module for each view.
"""

from trimaran.viz.catalogue import SHORT_NAMES, VIEWS, build_view, find_view
from trimaran.viz.figures import Figure, Formula, Mode, PlanView, view_as_dict
from trimaran.viz.show_values import show_value
from trimaran.viz.subject import LaunchText, RunLife, RunMedians, Subject
from trimaran.viz.texts import translate_view

__all__ = [
    "SHORT_NAMES",
    "VIEWS",
    "Figure",
    "Formula",
    "LaunchText",
    "Mode",
    "PlanView",
    "RunLife",
    "RunMedians",
    "Subject",
    "build_view",
    "find_view",
    "show_value",
    "translate_view",
    "view_as_dict",
]
