"""All views by name."""

from collections.abc import Mapping
from types import ModuleType

from trimaran.core import UserError, did_you_mean
from trimaran.ui.viz import (
    collectives,
    ddp_buckets,
    memory_need,
    offload,
    pipeline,
    rank_grid,
    run_life,
    shard_timeline,
    strategies,
    tensor_split,
    zero_stages,
)
from trimaran.ui.viz.figures import Mode, PlanView
from trimaran.ui.viz.subject import Controls, Subject

SHORT_NAMES: Mapping[str, ModuleType] = {
    "need": memory_need,
    "strategies": strategies,
    "life": run_life,
    "ddp": ddp_buckets,
    "fsdp": shard_timeline,
    "zero": zero_stages,
    "offload": offload,
    "pipeline": pipeline,
    "tensor": tensor_split,
    "mesh": rank_grid,
    "collectives": collectives,
}
NO_STEPS = "The run has not finished a step yet: nothing is measured."
VIEWS: Mapping[str, ModuleType] = {module.NAME: module for module in SHORT_NAMES.values()}


def find_view(name: str) -> ModuleType:
    if name in SHORT_NAMES:
        return SHORT_NAMES[name]
    if name in VIEWS:
        return VIEWS[name]
    known = (*SHORT_NAMES, *VIEWS)
    raise UserError(
        "V001.no-view",
        where="the name of the view",
        name=name[:60],
        guess=did_you_mean(name, known),
        short_names=", ".join(SHORT_NAMES),
    )


def build_view(name: str, subject: Subject) -> PlanView:
    """Return the view with this name of `subject`. Each module has the texts of its view, and computes its modes."""
    module = find_view(name)
    controls = Controls(subject, module.NAME)
    modes = module.modes_of(subject, controls)
    if subject.life is not None and "live" not in modes:
        modes["live"] = Mode(sentences=(NO_STEPS,))
    return PlanView(
        name=module.NAME,
        title=module.TITLE,
        question=module.QUESTION,
        about=subject.about,
        modes=modes,
        controls=controls.done(),
    )
