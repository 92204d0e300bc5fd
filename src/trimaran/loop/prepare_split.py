"""Splits a user's own model by a plan, and checks at the start that it computes what one process computes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from trimaran.core import AXES, Plan, UserError
from trimaran.loop.cut_module import Forward, find_blocks
from trimaran.loop.loop_context import num_rows_of
from trimaran.loop.split_loop import SplitLoop, gradients_of, rows_of_batch
from trimaran.parallel import build_mesh
from trimaran.parallel.axes.sharded_layers import ForeignColumns, ForeignRows, is_conv1d
from trimaran.parallel.comm.json_exchange import all_gather_json

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


TOLERANCE = 1e-3  # of a gradient's norm; a part that is missing or counted twice is off by far more
TRACED_ROWS = 2


@dataclass(slots=True)
class Computed:
    """What a model computed: the summed loss, the gradients by parameter, and its modules' first outputs by name."""

    loss: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, tuple[tuple[int, ...], float]] = field(default_factory=dict)


def prepare_split(
    model: nn.Module,
    optimizer: Optimizer,
    given: Plan | Mapping[str, Any],
    device: torch.device,
    *,
    forward: Forward,
    example: Any,
    tensor: Mapping[str, str] | None,
) -> SplitLoop:
    """Split `model` in place and return its loop; see `trimaran.prepare`. The process group must be initialised."""
    plan = read_split_plan(given, dist.get_world_size())
    if (plan.mesh.tp > 1) != bool(tensor):
        raise wrong_tensor(f"tp is {plan.mesh.tp}, and the tensor plan names {len(tensor or {})} layers",
                           "give both: plan={'tp': 2}, tensor={'*.up': 'columns', '*.down': 'rows'}")  # fmt: skip
    model.to(device)
    for each in model.state_dict().values():
        dist.broadcast(each, src=0)
    rows = _first_rows(example, plan)
    with _evaluated(model):
        whole = _alone(model, forward, rows, plan, device)
        traced = _to(rows_of_batch(rows, TRACED_ROWS), device)
        blocks = find_blocks(model, forward, traced, TRACED_ROWS) if plan.mesh.pp > 1 else None
    ranks = build_mesh(plan.mesh, device_type=device.type)
    if tensor:
        names = {id(each): name for name, each in model.named_parameters()}
        apply_tensor_plan(model, tensor, ranks.axes["tp"])
        _replace(optimizer, names, dict(model.named_parameters()))
    loop = SplitLoop(model, optimizer, plan, ranks, forward, blocks)
    with _evaluated(model):
        _refuse_difference(whole, _split(loop, rows))
    return loop


def _first_rows(example: Any, plan: Plan) -> Any:
    """Return as many rows of the example as there are micro-batches."""
    wanted, found = plan.mesh.dp * plan.grad_accum, num_rows_of(example, "prepare(example=...)")
    if found < wanted:
        raise UserError("P103", f"the example has {found} rows, and the plan {wanted} micro-batches",
                        where="prepare(example=...)", fix=f"pass a batch of at least {wanted} rows")  # fmt: skip
    return rows_of_batch(example, wanted)


def _alone(model: nn.Module, forward: Forward, rows: Any, plan: Plan, device: torch.device) -> Computed:
    """Return what the whole model computes for each row after the other, on this rank alone."""
    computed = Computed()
    with _recorded(model, computed.outputs):
        for number in range(plan.mesh.dp * plan.grad_accum):
            loss, _ = forward(_to(_row(rows, number), device))
            loss.backward()
            computed.loss += float(loss.detach())
    computed.gradients = gradients_of(model)
    model.zero_grad()
    return computed


def _split(loop: SplitLoop, rows: Any) -> Computed:
    """Return what the split model computes for the same rows."""
    computed = Computed()
    with _recorded(loop.model, computed.outputs):
        try:
            loop.forward_backward(rows)
        except RuntimeError as error:
            first = str(error).strip().partition("\n")[0]
            raise UserError("P105", f"the split model fails: {first}", where=WHERE,
                            fix="a module that counts heads must count those of its rank: view(..., -1, head_dim); or "
                            "split with columns-gathered and rows-of-whole") from error  # fmt: skip
    dist.all_reduce(loop._sums)
    computed.loss, loop._sums = float(loop._sums[0]), torch.zeros_like(loop._sums)
    computed.gradients = gradients_of(loop.model)
    loop.model.zero_grad()
    return computed


def _refuse_difference(whole: Computed, split: Computed) -> None:
    """Raise on all ranks if a rank found a difference, with the first module whose output or gradient differs."""
    names = list(whole.gradients)
    wrong = [names.index(name) for name, each in split.gradients.items() if _differs(whole.gradients[name], each)]
    outputs = list(whole.outputs)
    moved = [
        outputs.index(name)
        for name, (shape, value) in split.outputs.items()
        if whole.outputs[name][0] == shape and abs(value - whole.outputs[name][1]) > TOLERANCE * abs(value)
    ]
    found = all_gather_json([min(moved, default=-1), min(wrong, default=-1)])
    first_output = min((each for each, _ in found if each >= 0), default=-1)
    first_gradient = min((each for _, each in found if each >= 0), default=-1)
    loss_differs = abs(split.loss - whole.loss) > TOLERANCE * abs(whole.loss)
    if not loss_differs and first_gradient < 0:
        return
    part = outputs[first_output] if first_output >= 0 else names[first_gradient].rpartition(".")[0]
    what = f"the loss is {split.loss:.6g} instead of {whole.loss:.6g}" if loss_differs else "its gradient differs"
    raise UserError("P105", f"the split model computes something else than one process, first in {part}: {what}",
                    where=WHERE, fix="let every `columns` layer be followed by a `rows` layer, with nothing that mixes "
                    "columns or has weights in between; return the sum of the loss over rows, without randomness in "
                    "eval mode")  # fmt: skip


def _differs(expected: Tensor, found: Tensor) -> bool:
    scale = expected.norm().clamp(min=1e-6)
    return bool((found - expected).norm() > TOLERANCE * scale + 1e-6)


@contextmanager
def _recorded(model: nn.Module, outputs: dict[str, tuple[tuple[int, ...], float]]) -> Iterator[None]:
    """Record the shape of the first output of each module, and a number that sums it up."""

    def recorder(name: str) -> Callable[..., None]:
        def record(_: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                outputs.setdefault(name, (tuple(output.shape), float(output.detach().double().abs().sum())))

        return record

    present = [(name, part) for name, part in model.named_modules() if next(part.parameters(), None) is not None]
    handles = [part.register_forward_hook(recorder(name)) for name, part in present]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode, without dropout, and back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _row(batch: Any, number: int) -> Any:
    return tree_map(lambda each: each[number : number + 1] if isinstance(each, Tensor) and each.ndim else each, batch)


def _to(batch: Any, device: torch.device) -> Any:
    return tree_map(lambda each: each.to(device) if isinstance(each, Tensor) else each, batch)


def _replace(optimizer: Optimizer, names: Mapping[int, str], split: Mapping[str, nn.Parameter]) -> None:
    """Give the optimizer the slices. torch's loops over several tensors take no mixture of slices and whole ones."""
    for group in optimizer.param_groups:
        group["params"] = [split[names[id(each)]] for each in group["params"]]
        group.update({"foreach": False} if "foreach" in group else {}, **({"fused": None} if "fused" in group else {}))
