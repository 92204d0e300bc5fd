"""All views by name."""

from collections.abc import Callable, Mapping
from types import ModuleType

from trimaran.core import UserError, did_you_mean
from trimaran.viz import (
    collectives,
    ddp_buckets,
    memory_need,
    offload,
    pipeline,
    rank_grid,
    shard_timeline,
    strategies,
    tensor_split,
    zero_stages,
)
from trimaran.viz.figures import PlanView
from trimaran.viz.subject import Subject

Builder = Callable[[Subject], PlanView]
SHORT_NAMES: Mapping[str, ModuleType] = {
    "need": memory_need,
    "strategies": strategies,
    "ddp": ddp_buckets,
    "fsdp": shard_timeline,
    "zero": zero_stages,
    "offload": offload,
    "pipeline": pipeline,
    "tensor": tensor_split,
    "mesh": rank_grid,
    "collectives": collectives,
}
VIEWS: Mapping[str, Builder] = {module.NAME: module.build for module in SHORT_NAMES.values()}


def find_view(name: str) -> Builder:
    """Return the view with this name, long or short; raise UserError if there is none."""
    if name in SHORT_NAMES:
        return SHORT_NAMES[name].build
    if name in VIEWS:
        return VIEWS[name]
    known = (*SHORT_NAMES, *VIEWS)
    raise UserError("V001", f"there is no view '{name[:60]}'{did_you_mean(name, known)}", where="the name of the view",
                    fix=f"the views are {', '.join(SHORT_NAMES)}")  # fmt: skip


def build_view(name: str, subject: Subject) -> PlanView:
    return find_view(name)(subject)
