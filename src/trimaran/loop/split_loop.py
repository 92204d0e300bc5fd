"""`trimaran.prepare(plan=...)`: a user's own model, cut into pipeline stages and tensor slices, and its loop."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from trimaran.checkpoint.convert.export_hf import all_tensors
from trimaran.core import Plan, UserError
from trimaran.loop.cut_module import BlockList, Forward, StageEnd, cut_module
from trimaran.loop.loop_checkpoint import CheckpointFolders, SplitState
from trimaran.loop.loop_context import LoopContext, StepResult, as_tree, has_rows, num_rows_of
from trimaran.loop.loop_evaluation import write_weights
from trimaran.nets import Network
from trimaran.nets.absent_modules import StageStream
from trimaran.nets.local_shards import gathered
from trimaran.parallel import RankMesh, gradient_norm
from trimaran.parallel.axes.pp import TimedStage, build_schedule, split_blocks
from trimaran.parallel.mesh import map_stages
from trimaran.parallel.tensor_sums import local_gradient

WHERE = "loop.train_step(batch)"


class SplitLoop:
    """A model that pipeline stages and tensor slices split, its optimizer, and the forward of a micro-batch.

    Every rank must make every call. `forward(rows)` returns the loss summed over its rows and how many tokens or
    samples these are; it calls the model, of which this rank holds a part.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, plan: Plan, ranks: RankMesh, forward: Forward,
        blocks: BlockList | None,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.plan, self.device = model, optimizer, plan, ranks.device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._ranks, self._forward, self._blocks = ranks, forward, blocks
        self._context, self._rows = LoopContext(ranks.device), [0]
        self._context.rank, self._context.world_size = ranks.data_rank, ranks.degrees.dp
        self._stages = map_stages(plan, ranks)
        self._stream = self._cut() if blocks is not None else StageStream()
        self._sums = torch.zeros(2, dtype=torch.float64, device=self.device)  # loss, tokens
        self._batches: list[Any] = []
        self._state = SplitState(ranks.device)
        self._state.add(model, [optimizer], None)
        self._folders = CheckpointFolders(self._state, self.plan)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which should print and write."""
        return self.rank == 0

    def train_step(self, batch: Any, *, clip_norm: float = 0.0) -> StepResult:
        """Run forward and backward of the global `batch`, divide by its tokens, clip, update, zero the gradients."""
        self.forward_backward(batch)
        dist.all_reduce(self._sums)
        total, tokens = self._sums[0], self._sums[1].clamp(min=1)
        parameters = self._parameters()
        for each in parameters:
            if each.grad is not None:
                each.grad.div_(tokens)
        norm = gradient_norm(self._own_parameters(), pp=self.plan.mesh.pp)
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
            schedule = build_schedule(self.plan, [self._stage()])
            schedule.step(number=numbers, target=numbers, return_outputs=False)
        self._reduce_gradients()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any]) -> float:
        """Return the mean loss over all `batches`, which are global ones, the same on every rank."""
        before, modes = self._sums, [(each, each.training) for each in self.model.modules()]
        self._sums = torch.zeros_like(self._sums)
        self.model.eval()
        for batch in batches:
            self._deal(batch)
            for number in range(len(self._batches)):
                self._forward_only(number)
        for module, mode in modes:
            module.training = mode
        totals, self._sums = self._sums, before
        dist.all_reduce(totals)
        return float(totals[0] / totals[1].clamp(min=1))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole weights, by their names in the model, on the CPU of the main rank; else an empty dict."""
        tensors = all_tensors([Network(self.model, (), None)], self._stages, self.rank, self._full_tensors)
        full = dict(tensors)
        return full if self.is_main else {}

    def save_weights(self, file: str | Path) -> Path:
        """Write the whole weights, nothing else, to a .safetensors file; return its path. See `Loop.save_weights`."""
        return write_weights(file, self.state_dict())

    def save(self, folder: str | Path, step: int, **others: Any) -> Path:
        """Write a checkpoint, which loads under any other plan, and return its folder. See `Loop.save`."""
        self._state.others = others
        return self._folders.open(folder).save(step)

    def resume(self, folder: str | Path, **others: Any) -> int:
        """Load the newest complete checkpoint in `folder` and return its step; 0 when there is none."""
        self._state.others = others
        self._context.num_steps = self._folders.open(folder).resume()
        return self._context.num_steps

    def _cut(self) -> StageStream:
        """Remove the stages of other ranks, and their parameters from the optimizer."""
        assert self._blocks is not None
        stack = self.model.get_submodule(self._blocks.name)
        if self.plan.num_stages > self._blocks.count:
            raise UserError("P103", f"{self.plan.num_stages} stages are more than the {self._blocks.count} blocks of "
                            f"{self._blocks.name}", where="prepare(plan=...)", fix="use a lower pp")  # fmt: skip
        counts = self.plan.pipeline.stages or split_blocks([*stack.children()], self.plan.num_stages)
        if sum(counts) != self._blocks.count or len(counts) != self.plan.num_stages:
            raise UserError("P103", f"{len(counts)} stages of {sum(counts)} blocks do not hold the "
                            f"{self._blocks.count} of {self._blocks.name} once", where="prepare(plan=...)",
                            fix="leave pipeline.stages out")  # fmt: skip
        (number,) = self._stages.here
        start = sum(counts[:number])
        stream = cut_module(self.model, self._blocks, range(start, start + counts[number]), self._rows)
        kept = {id(each) for each in self.model.parameters()}
        for group in self.optimizer.param_groups:
            group["params"] = [each for each in group["params"] if id(each) in kept]
        return stream

    def _deal(self, batch: Any) -> None:
        """Take this rank's micro-batches of a global batch."""
        num_rows, count = num_rows_of(batch, WHERE), self.plan.grad_accum
        parts = self.plan.mesh.dp * count
        if num_rows % parts:
            raise UserError("P040", f"a batch of {num_rows} rows does not split into {parts} micro-batches: "
                            f"{count} for each of {self.plan.mesh.dp} replicas", where=WHERE,
                            fix=f"pass a multiple of {parts} rows, or set grad_accum in the plan")  # fmt: skip
        self._context.check_same(batch, num_rows=num_rows, where=WHERE)
        size, tree = num_rows // parts, as_tree(batch)
        starts = [(self._ranks.data_rank * count + number) * size for number in range(count)]
        take = self._context.to_device
        self._batches = [take(tree_map(lambda each, at=at: each[at : at + size] if has_rows(each) else each, tree))
                         for at in starts]  # fmt: skip
        self._rows[0] = size

    def _stage(self) -> TimedStage:
        (number,) = self._stages.here
        stream = self._empty_stream()
        return TimedStage(self.model, number, self._stages, streams=(stream, stream), compute=self._compute,
                          timer=lambda _: contextlib.nullcontext())  # fmt: skip

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
        raise UserError("P103", "forward returned before the next stage's first block was reached", where=WHERE,
                        fix="call the model in forward on every rank")  # fmt: skip

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

    def _reduce_gradients(self) -> None:
        """Sum gradients over the replicas, and those of tied parameters over the first and the last stage."""
        named = dict(self.model.named_parameters())
        tied = sorted(self._blocks.tied) if self._blocks is not None and self.plan.mesh.pp > 1 else []
        for name in tied:
            each = named.get(name)
            if each is not None and each.grad is None:
                each.grad = torch.zeros_like(each)
        ends = (0, self._stages.last)
        for name in tied if self._stages.here[0] in ends else ():
            self._sum_with_peer(local_gradient(named[name]), self._stages.last - self._stages.here[0])
        if self.plan.mesh.dp > 1:
            for each in named.values():
                if each.grad is not None:
                    dist.all_reduce(local_gradient(each), group=self._ranks.data.get_group())

    def _sum_with_peer(self, mine: Tensor, peer: int) -> None:
        theirs, group = torch.empty_like(mine), self._stages.group
        exchange = [dist.P2POp(dist.isend, mine, group=group, group_peer=peer),
                    dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer)]  # fmt: skip
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        mine.add_(theirs)

    def _parameters(self) -> list[nn.Parameter]:
        return [each for each in self.model.parameters() if each.requires_grad]

    def _own_parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters without the last stage's copies of tied ones."""
        copies = self._blocks.tied if self._blocks is not None and self._stages.here[0] > 0 else frozenset()
        return [each for name, each in self.model.named_parameters() if each.requires_grad and name not in copies]

    def _full_tensors(self, network: Network) -> Iterator[tuple[str, Tensor]]:
        copies: frozenset[str] = frozenset()
        if self._blocks is not None and self._stages.here[0] > 0:
            copies = self._blocks.tied
        for name, each in network.module.state_dict().items():
            if isinstance(each, Tensor) and name not in copies:
                yield name, gathered(each.detach()).cpu().contiguous()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole gradients of the parameters that a rank holds, by name. A collective for slices."""
    found = {}
    for name, each in model.named_parameters():
        if each.grad is not None:
            grad = each.grad
            found[name] = (gathered(grad) if isinstance(grad, DTensor) else grad).detach().clone()
    return found


def rows_of_batch(batch: Any, count: int) -> Any:
    """Return the first `count` rows of a batch."""
    return tree_map(lambda each: each[:count] if has_rows(each) else each, as_tree(batch))
