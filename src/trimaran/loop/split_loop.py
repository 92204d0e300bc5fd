"""`trimaran.prepare(plan=...)`: a user's own model, cut into pipeline stages and tensor slices, and its loop."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from trimaran.checkpoint.convert.export_hf import all_tensors
from trimaran.core import AXES, Plan, UserError, templated
from trimaran.loop.cut_module import BlockList, Forward, StageEnd, cut_module, find_blocks
from trimaran.loop.loop_checkpoint import LoopState, SavedLoop
from trimaran.loop.loop_context import LoopContext, StepResult, as_tree, eval_mode, has_rows, num_rows_of, to_device
from trimaran.loop.loop_optimizers import replace_parameters
from trimaran.nets import Network
from trimaran.nets.absent_modules import StageStream
from trimaran.nets.local_shards import gathered
from trimaran.parallel import RankMesh, all_gather_json, build_mesh, gradient_norm
from trimaran.parallel.axes.pp import TimedStage, build_schedule, split_blocks
from trimaran.parallel.axes.sharded_layers import ForeignColumns, ForeignRows, is_conv1d
from trimaran.parallel.mesh import map_stages
from trimaran.parallel.tensor_sums import local_gradient

WHERE = "loop.train_step(batch)"
PLAN_WHERE = "prepare(plan=...)"


class SplitLoop(SavedLoop):
    """A model that pipeline stages and tensor slices split, its optimizer, and the forward of a micro-batch.

    Every rank must make every call. `forward(rows)` returns the loss summed over its rows and how many tokens or
    samples these are; it calls the model, of which this rank holds a part.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, plan: Plan, ranks: RankMesh, forward: Forward,
        blocks: BlockList | None,
    ) -> None:  # fmt: skip
        super().__init__(plan, LoopContext(ranks.device), LoopState(ranks.device, is_split=True))
        self.model, self.optimizer, self._rows = model, optimizer, [0]
        self._ranks, self._forward, self._blocks = ranks, forward, blocks
        self._context.rank, self._context.world_size = ranks.data_rank, ranks.degrees.dp
        self._stages = map_stages(plan, ranks)
        self._stream = StageStream()
        if blocks is not None:  # remove the stages of other ranks, and their parameters from the optimizer
            if plan.num_stages > blocks.count:
                raise UserError(
                    "P103.stages-more-blocks",
                    where=PLAN_WHERE,
                    num_stages=plan.num_stages,
                    count=blocks.count,
                    blocks=blocks.name,
                )
            stack = model.get_submodule(blocks.name)
            counts = plan.pipeline.stages or split_blocks([*stack.children()], plan.num_stages)
            if sum(counts) != blocks.count or len(counts) != plan.num_stages:
                raise UserError(
                    "P103.stages-blocks",
                    where=PLAN_WHERE,
                    num_counts=len(counts),
                    total=sum(counts),
                    count=blocks.count,
                    blocks=blocks.name,
                )
            (number,) = self._stages.here
            start = sum(counts[:number])
            self._stream = cut_module(model, blocks, range(start, start + counts[number]), self._rows)
            kept = {id(each) for each in model.parameters()}
            for group in optimizer.param_groups:
                group["params"] = [each for each in group["params"] if id(each) in kept]
        self._sums = torch.zeros(2, dtype=torch.float64, device=self.device)  # loss, tokens
        self._batches: list[Any] = []
        self._state.add(model, [optimizer], None)

    def train_step(self, batch: Any, *, clip_norm: float = 0.0) -> StepResult:
        """Run forward and backward of the global `batch`, divide by its tokens, clip, update, zero the gradients."""
        self.forward_backward(batch)
        dist.all_reduce(self._sums)
        total, tokens = self._sums[0], self._sums[1].clamp(min=1)
        parameters = [each for each in self.model.parameters() if each.requires_grad]
        for each in parameters:
            if each.grad is not None:
                each.grad.div_(tokens)
        named, copied = self.model.named_parameters(), self._copied
        own = [each for name, each in named if each.requires_grad and name not in copied]
        norm = gradient_norm(own, pp=self.plan.mesh.pp)
        if clip_norm:
            scale = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
            for each in parameters:
                if each.grad is not None:
                    each.grad.mul_(scale)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._sums = torch.zeros_like(self._sums)
        self._context.num_steps += 1
        return StepResult(total / tokens, norm, tokens)

    def forward_backward(self, batch: Any) -> None:
        """Accumulate the gradient of the summed loss of the global `batch`, on all ranks."""
        self._deal(batch)
        if self._blocks is None:
            for rows in self._batches:
                self._last(rows).backward()
        else:
            numbers = torch.arange(len(self._batches))
            (number,), stream = self._stages.here, self._empty_stream()
            stage = TimedStage(self.model, number, self._stages, streams=(stream, stream), compute=self._compute,
                               timer=lambda _: contextlib.nullcontext())  # fmt: skip
            schedule = build_schedule(self.plan, [stage])
            schedule.step(number=numbers, target=numbers, return_outputs=False)
        # Sum gradients of tied parameters over the first and the last stage, and all over the replicas.
        named = dict(self.model.named_parameters())
        tied = sorted(self._blocks.tied) if self._blocks is not None and self.plan.mesh.pp > 1 else []
        for each in (named[name] for name in tied if name in named):
            if each.grad is None:
                each.grad = torch.zeros_like(each)
        here, last = self._stages.here[0], self._stages.last
        for name in tied if here in (0, last) else ():
            mine = local_gradient(named[name])
            theirs = torch.empty_like(mine)
            exchange = [dist.P2POp(dist.isend, mine, group=self._stages.group, group_peer=last - here),
                        dist.P2POp(dist.irecv, theirs, group=self._stages.group, group_peer=last - here)]  # fmt: skip
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            mine.add_(theirs)
        if self.plan.mesh.dp > 1:
            for each in named.values():
                if each.grad is not None:
                    dist.all_reduce(local_gradient(each), group=self._ranks.data.get_group())

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any]) -> float:
        """Return the mean loss over all `batches`, which are global ones, the same on every rank."""
        before, self._sums = self._sums, torch.zeros_like(self._sums)
        with eval_mode(self.model):
            for batch in batches:
                self._deal(batch)
                for number in range(len(self._batches)):
                    self._forward_only(number)
        totals, self._sums = self._sums, before
        dist.all_reduce(totals)
        return float(totals[0] / totals[1].clamp(min=1))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole weights, by their names in the model, on the CPU of the main rank; else an empty dict."""
        copied = self._copied

        def tensors_of(network: Network) -> Iterator[tuple[str, Tensor]]:
            for name, each in network.module.state_dict().items():
                if isinstance(each, Tensor) and name not in copied:
                    yield name, gathered(each.detach()).cpu().contiguous()

        full = dict(all_tensors([Network(self.model, (), None)], self._stages, self.rank, tensors_of))
        return full if self.is_main else {}

    def _deal(self, batch: Any) -> None:
        """Take this rank's micro-batches of a global batch."""
        num_rows, count = num_rows_of(batch, WHERE), self.plan.grad_accum
        parts = self.plan.mesh.dp * count
        if num_rows % parts:
            raise UserError(
                "P040.batch-rows", where=WHERE, num_rows=num_rows, parts=parts, count=count, dp=self.plan.mesh.dp
            )
        self._context.check_same(batch, num_rows=num_rows, where=WHERE)
        self._rows[0] = size = num_rows // parts
        starts = [(self._ranks.data_rank * count + number) * size for number in range(count)]
        self._batches = [to_device(rows_of_batch(batch, at, at + size), self.device) for at in starts]

    def _empty_stream(self) -> Tensor:
        assert self._blocks is not None
        shape, dtype = self._blocks.stream
        rows = self._rows[0] if shape[0] == self._blocks.rows else shape[0]
        return torch.empty(rows, *shape[1:], dtype=dtype, device=self.device, requires_grad=True)

    def _compute(self, *stream: Tensor, number: Tensor) -> Tensor:
        """Return the stream that leaves this stage for a micro-batch, or the loss in the last one."""
        self._stream.entering = stream[0] if stream else None
        rows = self._batches[int(number)]
        if self._stages.has_last:
            return self._last(rows)
        try:
            self._forward(rows)
        except StageEnd as end:
            return end.stream.contiguous()
        raise UserError("P103.forward-returned-before", where=WHERE)

    def _last(self, rows: Any) -> Tensor:
        """Return the summed loss, of which only the first tensor-parallel rank counts the sum."""
        loss, count = self._forward(rows)
        if self._ranks.rank("tp") == 0:
            self._sums[0].add_(loss.detach())
            self._sums[1].add_(count)
        return loss

    def _forward_only(self, number: int) -> None:
        """Pass a micro-batch through the stages, without backward."""
        index = torch.tensor(number)
        if self._blocks is None:
            self._last(self._batches[number])
            return
        (stage,), group = self._stages.here, self._stages.group
        stream = ()
        if stage > 0:
            received = self._empty_stream().detach()
            dist.recv(received, group=group, group_src=stage - 1)
            stream = (received,)
        result = self._compute(*stream, number=index)
        if not self._stages.has_last:
            dist.send(result, group=group, group_dst=stage + 1)

    @property
    def _copied(self) -> frozenset[str]:
        """The names of this stage's copies of tied parameters."""
        return self._blocks.tied if self._blocks is not None and self._stages.here[0] > 0 else frozenset()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole gradients of the parameters that a rank holds, by name. A collective for slices."""
    found = {}
    for name, each in model.named_parameters():
        if (grad := each.grad) is not None:
            found[name] = (gathered(grad) if isinstance(grad, DTensor) else grad).detach().clone()
    return found


def rows_of_batch(batch: Any, start: int, stop: int) -> Any:
    return tree_map(lambda each: each[start:stop] if has_rows(each) else each, as_tree(batch))


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
    """Return the plan, with ranks left over as replicas. In a mapping, `pp` and `tp` may stand outside of `mesh`."""
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
            raise wrong_tensor(
                f"{style!r} is not a way to split a layer", templated("use {styles}", styles=", ".join(STYLES))
            )
        found = [(name, each) for name, each in model.named_modules() if fnmatchcase(name, pattern)]
        if not found:
            raise wrong_tensor(f"the pattern {pattern} matches no module",
                               "print([name for name, _ in model.named_modules()])")  # fmt: skip
        for name, each in found:
            module: Any = each
            if not isinstance(module, nn.Linear) and not is_conv1d(module):
                raise wrong_tensor(f"{name} is a {type(module).__name__}, and only linear layers are split",
                                   "name linear layers only")  # fmt: skip
            rows, columns = module.weight.shape
            outputs, inputs = (columns, rows) if is_conv1d(module) else (rows, columns)
            width = outputs if style.startswith("columns") else inputs
            if width % mesh.size():
                raise wrong_tensor(f"tp {mesh.size()} does not divide the {width} {style.partition('-')[0]} of {name}",
                                   "use a tp that divides them, and the heads of attention")  # fmt: skip
            layer = STYLES[style]
            layer.src_data_rank = None
            layer._apply(each, mesh)


def _wrong(what: str, fix: str) -> UserError:
    return UserError("P103", what, where=PLAN_WHERE, fix=fix)


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
    wanted, found = plan.mesh.dp * plan.grad_accum, num_rows_of(example, "prepare(example=...)")
    if found < wanted:
        raise UserError("P103.example-rows-plan", where="prepare(example=...)", found=found, wanted=wanted)
    rows = rows_of_batch(example, 0, wanted)
    with eval_mode(model):
        whole = Computed()  # for each row after the other, on this rank alone
        with _recorded(model, whole.outputs):
            for number in range(wanted):
                loss, _ = forward(to_device(rows_of_batch(rows, number, number + 1), device))
                loss.backward()
                whole.loss += float(loss.detach())
        whole.gradients = gradients_of(model)
        model.zero_grad()
        traced = to_device(rows_of_batch(rows, 0, TRACED_ROWS), device)
        blocks = find_blocks(model, forward, traced, TRACED_ROWS) if plan.mesh.pp > 1 else None
    ranks = build_mesh(plan.mesh, device_type=device.type)
    if tensor:
        names = {id(each): name for name, each in model.named_parameters()}
        apply_tensor_plan(model, tensor, ranks.axes["tp"])
        replace_parameters([optimizer], names, dict(model.named_parameters()))
        for group in optimizer.param_groups:  # torch's loops over several tensors take no mixture of slices and whole
            group.update({name: value for name, value in (("foreach", False), ("fused", None)) if name in group})
    loop = SplitLoop(model, optimizer, plan, ranks, forward, blocks)
    with eval_mode(model):
        split = Computed()  # for the same rows
        with _recorded(model, split.outputs):
            try:
                loop.forward_backward(rows)
            except RuntimeError as error:
                first = str(error).strip().partition("\n")[0]
                raise UserError("P105.split-model-fails", where=PLAN_WHERE, first=first) from error
        dist.all_reduce(loop._sums)
        split.loss, loop._sums = float(loop._sums[0]), torch.zeros_like(loop._sums)
        split.gradients = gradients_of(model)
        model.zero_grad()
        _refuse_difference(whole, split)
    return loop


def _refuse_difference(whole: Computed, split: Computed) -> None:
    """Raise on all ranks if a rank found a difference, with the first module whose output or gradient differs."""
    names = list(whole.gradients)
    wrong = []
    for number, name in enumerate(names):
        if (found := split.gradients.get(name)) is not None:
            expected = whole.gradients[name]
            if (found - expected).norm() > TOLERANCE * expected.norm().clamp(min=1e-6) + 1e-6:
                wrong.append(number)
    outputs = list(whole.outputs)
    moved = [
        outputs.index(name)
        for name, (shape, value) in split.outputs.items()
        if whole.outputs[name][0] == shape and abs(value - whole.outputs[name][1]) > TOLERANCE * abs(value)
    ]
    ranks = all_gather_json([min(moved, default=-1), min(wrong, default=-1)])
    first_output, first_gradient = (
        min((each for each in some if each >= 0), default=-1) for some in zip(*ranks, strict=True)
    )
    loss_differs = abs(split.loss - whole.loss) > TOLERANCE * abs(whole.loss)
    if not loss_differs and first_gradient < 0:
        return
    part = outputs[first_output] if first_output >= 0 else names[first_gradient].rpartition(".")[0]
    what = f"the loss is {split.loss:.6g} instead of {whole.loss:.6g}" if loss_differs else "its gradient differs"
    raise UserError("P105.split-model-computes", where=PLAN_WHERE, part=part, text=what)


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
