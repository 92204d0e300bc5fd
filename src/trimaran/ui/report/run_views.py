"""The views of package viz that suit a run's plan, as data for its page."""

from typing import Any

from trimaran.core import Plan, UserError
from trimaran.runs import RunDirectory
from trimaran.ui.viz.catalogue import build_view
from trimaran.ui.viz.figures import PlanView, view_as_dict
from trimaran.ui.viz.viz_request import read_subject

Tree = dict[str, Any]


def view_names(plan: Plan) -> list[str]:
    """Return the short names of the views that say something about `plan`."""
    mesh = plan.mesh
    return [
        "need",
        *(["ddp"] if mesh.dp_replicate > 1 and mesh.dp_shard == 1 and mesh.pp == 1 else []),
        *(["fsdp"] if mesh.dp_shard > 1 and plan.sharding == "parameters" else []),
        *(["zero"] if mesh.dp_shard > 1 else []),
        *(["pipeline"] if mesh.pp > 1 else []),
        *(["tensor"] if mesh.tp > 1 else []),
        *(["mesh"] if mesh.world_size > 1 else []),
    ]


def build_run_views(run: RunDirectory) -> tuple[list[PlanView], str]:
    """Return the views that suit the run, with what it measured; and why there are none, if there are none."""
    try:
        subject = read_subject(None, str(run.path), None, [], [])
        return [build_view(name, subject) for name in view_names(subject.plan)], ""
    except UserError as error:
        return [], error.what


def views_of(run: RunDirectory) -> tuple[list[Tree], str]:
    """Return `build_run_views` as JSON, each view with the one mode that says most about a run."""
    views, trouble = build_run_views(run)
    return [_shown(each) for each in views], trouble


def _shown(view: PlanView) -> Tree:
    """Return a view with what was measured, or else simulated, or else explained."""
    mode = next(name for name in ("live", "simulate", "explain") if name in view.modes)
    found = view_as_dict(view)
    return (
        {name: found[name] for name in ("name", "title", "question", "about")} | {"mode": mode} | found["modes"][mode]
    )
