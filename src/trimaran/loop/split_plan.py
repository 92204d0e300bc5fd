"""Reads the plan of `prepare(plan=...)`: degrees, schedule and micro-batches, and the tensor plan."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from pydantic import ValidationError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trimaran.core import AXES, Plan, UserError
from trimaran.parallel.axes.foreign_layers import ForeignColumns, ForeignRows, is_conv1d

WHERE = "prepare(plan=...)"
TENSOR_WHERE = "prepare(tensor=...)"
SPLITS = ("pp", "tp")  # what this API splits a model by; the other ranks are replicas
SCHEDULES = ("gpipe", "1f1b")
STYLES = {
    "columns": ForeignColumns(),
    "rows": ForeignRows(),
    "columns-gathered": ForeignColumns(gathers=True),
    "rows-of-whole": ForeignRows(takes=True),
}


def read_split_plan(given: Plan | Mapping[str, Any], world_size: int) -> Plan:
    """Return the plan, in which the ranks that `pp` and `tp` leave are replicas.

    A mapping has the fields of a recipe's plan; `pp` and `tp` may stand outside of `mesh`.
    """
    tree = given.model_dump(exclude_unset=True) if isinstance(given, Plan) else dict(given)
    mesh = dict(tree.pop("mesh", {})) | {axis: tree.pop(axis) for axis in AXES if axis in tree}
    if others := [axis for axis, degree in mesh.items() if axis not in (*SPLITS, "dp_replicate") and degree != 1]:
        raise _wrong(f"{others[0]} does not split a model of your own", "use pp, tp and dp_replicate")
    degree = mesh.get("pp", 1) * mesh.get("tp", 1)
    if not degree or world_size % degree:
        raise _wrong(f"{degree} ranks for pp x tp do not divide the {world_size} ranks of this job",
                     f"start a multiple of {degree} ranks, or use other degrees")  # fmt: skip
    mesh = {"dp_replicate": world_size // degree} | mesh
    try:
        plan = Plan.model_validate({"micro_batch": 1, "grad_accum": mesh.get("pp", 1)} | tree | {"mesh": mesh})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _wrong(f"{where}: {first['msg']}", "use the fields of plan in a recipe") from None
    if plan.mesh.world_size != world_size:
        raise _wrong(f"the plan is for {plan.mesh.world_size} ranks, and there are {world_size}",
                     "leave dp_replicate out")  # fmt: skip
    if plan.mesh.pp > 1 and (plan.pipeline.schedule not in SCHEDULES or plan.grad_accum < plan.mesh.pp):
        raise _wrong(f"{plan.pipeline.schedule} with {plan.grad_accum} micro-batches cannot run here",
                     f"use the schedule 1f1b or gpipe, and a grad_accum of at least {plan.mesh.pp}")  # fmt: skip
    if plan.sharding != "none":
        raise _wrong("a model that is split by pp or tp is not sharded as well", "leave sharding out")
    return plan


def apply_tensor_plan(model: nn.Module, tensor: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Split the layers that the patterns match, in place. Raises UserError if a pattern matches none."""
    for pattern, style in tensor.items():
        if style not in STYLES:
            raise wrong_tensor(f"{style!r} is not a way to split a layer", f"use {', '.join(STYLES)}")
        found = [(name, each) for name, each in model.named_modules() if fnmatchcase(name, pattern)]
        if not found:
            raise wrong_tensor(f"the pattern {pattern} matches no module",
                               "print([name for name, _ in model.named_modules()])")  # fmt: skip
        for name, each in found:
            _refuse_width(name, each, style, mesh.size())
            layer = STYLES[style]
            layer.src_data_rank = None
            layer._apply(each, mesh)


def _refuse_width(name: str, module: Any, style: str, degree: int) -> None:
    if not isinstance(module, nn.Linear) and not is_conv1d(module):
        raise wrong_tensor(f"{name} is a {type(module).__name__}, and only linear layers are split",
                           "name linear layers only")  # fmt: skip
    rows, columns = module.weight.shape
    outputs, inputs = (columns, rows) if is_conv1d(module) else (rows, columns)
    width = outputs if style.startswith("columns") else inputs
    if width % degree:
        raise wrong_tensor(f"tp {degree} does not divide the {width} {style.partition('-')[0]} of {name}",
                           "use a tp that divides them, and the heads of attention")  # fmt: skip


def _wrong(what: str, fix: str) -> UserError:
    return UserError("P103", what, where=WHERE, fix=fix)


def wrong_tensor(what: str, fix: str) -> UserError:
    return UserError("P104", what, where=TENSOR_WHERE, fix=fix)
