"""Pipeline parallelism: each rank holds some stages, and micro-batches pass from stage to stage."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Private in torch, like the end of a backward that `_reduce_towers_sharded_alone` calls.
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from trimaran.core import Phase, Plan
from trimaran.models import cheapest_split
from trimaran.nets import Network
from trimaran.parallel.axes.fsdp import parameter_groups
from trimaran.parallel.mesh import RankMesh, StageMap
from trimaran.parallel.tensor_sums import local_gradient

NO_MEMORY = torch.device("meta")
Schedule = ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B | ScheduleZBVZeroBubble
Compute = Callable[..., Tensor]  # takes the stream (not in the first stage) and keyword inputs, returns the stream
PhaseTimer = Callable[[Phase], AbstractContextManager[object]]  # records the time spent in a phase


def split_blocks(blocks: Sequence[nn.Module], num_stages: int) -> tuple[int, ...]:
    """Return how many blocks each stage gets, so that the stage with the most parameters has as few as possible."""
    return cheapest_split([max(1, sum(each.numel() for each in block.parameters())) for block in blocks], num_stages)


class TimedStage(PipelineStage):
    """A stage for torch's schedules: one tensor in and one out; the output of the last stage is the loss.

    `streams` are examples of the input and output. Without them torch runs a trial step and sends pickled metadata. The
    methods override torch's and record the time of each phase. torch would keep memory for the messages of all
    micro-batches; a stage of ours has it from the receive to the pass that uses it.
    """

    def __init__(
        self,
        module: nn.Module,
        number: int,
        stages: StageMap,
        *,
        streams: tuple[Tensor, Tensor],
        compute: Compute,
        timer: PhaseTimer,
    ) -> None:
        entering, leaving = streams
        loss = torch.empty((), device="meta", requires_grad=True)
        super().__init__(
            module,
            number,
            len(stages.owners),
            entering.device,
            input_args=() if number == 0 else (entering,),
            output_args=(loss,) if number == stages.last else (leaving,),
            group=stages.group,
        )
        self._compute, self._timer = compute, timer
        self._has_freed_messages = False

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._free_all_messages()
        _move_messages(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._free_all_messages()
        if self.has_backward and not self.is_last:
            _move_messages(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_fwd_input(self, *args: Any, **kwargs: Any) -> None:
        self._free_all_messages()
        super().set_local_fwd_input(*args, **kwargs)

    def set_local_bwd_input(self, *args: Any, **kwargs: Any) -> None:
        self._free_all_messages()
        super().set_local_bwd_input(*args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._compute(*args, **kwargs)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._timer("forward"), unwrap_stage_errors():
            output = super().forward_one_chunk(*args, **kwargs)
        _move_messages(self.args_recv_info[_chunk_of(args, kwargs, "fwd_chunk_id")], NO_MEMORY)
        return output

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self._timer("backward"), unwrap_stage_errors():
            if not kwargs.get("full_backward", True):
                self._unshard()
            super().backward_one_chunk(*args, **kwargs)
        _move_messages(self.grad_recv_info[_chunk_of(args, kwargs, "bwd_chunk_id")], NO_MEMORY)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self._timer("backward"), unwrap_stage_errors():
            self._unshard()
            super().backward_weight_one_chunk(*args, **kwargs)

    def perform_reduce_grad(self, *args: Any, **kwargs: Any) -> None:
        with self._timer("comm"):
            super().perform_reduce_grad(*args, **kwargs)
            # Reduce the gradients of sharded towers in a stage whose root is replicated.
            # torch reduces those of the units that the root knows. A replicated root knows no sharded ones: their
            # outermost modules are roots themselves.
            for module in self.submod.modules() if isinstance(self.submod, ReplicateModule) else ():
                if not isinstance(module, FSDPModule) or isinstance(module, ReplicateModule):
                    continue
                state: Any = module._get_fsdp_state()
                if state._is_root:
                    for group in parameter_groups(module):
                        group.post_backward()
                    state._root_post_backward_final_callback()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return the messages that connect this stage to its neighbours, without those that a rank sends to itself.

        With a V schedule two stages in a row are on one rank, and gloo cannot send to the own rank. torch calls this
        before the first step; since 2.12 it does so no more.
        """
        return [each for each in super()._get_init_p2p_neighbors_ops() if each.group_peer != self.group_rank]

    def _free_all_messages(self) -> None:
        """Free the memory that torch has allocated for all micro-batches: once, before anything is received."""
        if not self._has_freed_messages:
            self._has_freed_messages = True
            for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
                _move_messages(infos, NO_MEMORY)

    def _unshard(self) -> None:
        """Unshard the weights for a split backward, which looks up current parameters: shards would get no gradient."""
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.unshard()


def _chunk_of(args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> int:
    """Return the micro-batch of a call of one of torch's methods, whose first argument it is."""
    return kwargs[name] if name in kwargs else args[0]


def _move_messages(infos: Sequence[Any], device: torch.device) -> None:
    """Give the messages that a stage receives memory on the device, or take it (meta) but for what autograd keeps."""
    for info in infos:
        buffer = getattr(info, "buffer", None)
        if buffer is not None and buffer.device.type != device.type:
            info.buffer = torch.empty_like(buffer, device=device).requires_grad_(buffer.requires_grad)


@contextmanager
def unwrap_stage_errors() -> Iterator[None]:
    """Re-raise the original error of a stage. torch wraps it in one that lists shapes and hides the cause."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is None or "ailed to run" not in str(error):
            raise
        raise error.__cause__ from None


def build_schedule(plan: Plan, stages: list[TimedStage]) -> Schedule:
    """Return the plan's schedule over this rank's stages, which sums gradients over micro-batches."""
    options: dict[str, Any] = {"n_microbatches": plan.grad_accum, "loss_fn": lambda loss, _: loss, "scale_grads": False}
    if plan.pipeline.schedule in ("gpipe", "1f1b"):
        (stage,) = stages
        return (ScheduleGPipe if plan.pipeline.schedule == "gpipe" else Schedule1F1B)(stage, **options)
    interleaved = plan.pipeline.schedule == "interleaved"
    return (ScheduleInterleaved1F1B if interleaved else ScheduleZBVZeroBubble)([*stages], **options)


def empty_streams(
    network: Network, ranks: RankMesh, inputs: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return empty tensors like the input and output of a stage for one micro-batch of `inputs`."""
    shapes = network.stream_shape(inputs, tp=ranks.degrees.tp)
    entering, leaving = (torch.empty(shape, dtype=dtype, device=ranks.device, requires_grad=True) for shape in shapes)
    return entering, leaving


def forward_through_stages(stages: StageMap, computes: Sequence[Compute], entering: Sequence[Tensor]) -> Tensor | None:
    """Return the last stage's output in a forward that schedules do not support; None on ranks without that stage."""
    stream_in: tuple[Tensor, ...] = ()
    for number, compute, stream in zip(stages.here, computes, entering, strict=True):
        if number > 0 and number - 1 not in stages.here:
            received = torch.empty_like(stream, requires_grad=False)
            dist.recv(received, group=stages.group, group_src=stages.owners[number - 1])
            stream_in = (received,)
        stream_in = (compute(*stream_in),)
        if number < stages.last and number + 1 not in stages.here:
            dist.send(stream_in[0], group=stages.group, group_dst=stages.owners[number + 1])
    return stream_in[0] if stages.has_last else None


@dataclass(frozen=True, slots=True)
class StageFacts:
    """Facts about all stages, equal on every rank of a pipeline."""

    first_trained: int  # the first stage with trained parameters; stages before it need no gradient
    tied: tuple[int, ...]  # the two stages with a copy of a tied embedding


def gather_stage_facts(networks: Sequence[Network], stages: StageMap, device: torch.device) -> StageFacts:
    """Return the facts of all stages, all-reduced over the pipeline. Every rank must call."""
    table = torch.zeros(len(stages.owners), 2, dtype=torch.int32, device=device)
    for number, network in zip(stages.here, networks, strict=True):
        table[number] = torch.tensor(_flags_of_stage(network))
    dist.all_reduce(table, group=stages.group)
    return _facts_of(table.tolist())


def facts_of_all_stages(networks: Sequence[Network]) -> StageFacts:
    """Return the same from the networks of all stages, which may be on the meta device, without communication."""
    return _facts_of([_flags_of_stage(network) for network in networks])


def _flags_of_stage(network: Network) -> tuple[bool, bool]:
    """Return whether a stage is trained, and whether it has a trained copy of a tied embedding."""
    copy = network.tied_embedding
    trained = any(each.requires_grad for each in network.module.parameters())
    return trained, copy is not None and copy.requires_grad


def _facts_of(rows: Sequence[Sequence[bool | int]]) -> StageFacts:
    trained, tied = ([number for number, row in enumerate(rows) if row[column]] for column in (0, 1))
    return StageFacts(first_trained=trained[0], tied=tuple(tied))


def sum_tied_gradients(networks: Sequence[Network], stages: StageMap, facts: StageFacts) -> None:
    """Give both copies of a tied embedding the sum of their gradients, shard by shard, so they stay equal."""
    here = {number: network for number, network in zip(stages.here, networks, strict=True) if number in facts.tied}
    copies = [network.tied_embedding for network in here.values()]
    gradients = [local_gradient(weight) for weight in copies if weight is not None]
    if len(gradients) == 2:  # both copies are on this rank, as in a V schedule
        gradients[1].copy_(gradients[0].add_(gradients[1]))
    elif gradients:
        (mine,), theirs = gradients, torch.empty_like(gradients[0])
        (other,) = (number for number in facts.tied if number not in here)
        peer = stages.owners[other]
        exchange = [
            dist.P2POp(dist.isend, mine, group=stages.group, group_peer=peer),
            dist.P2POp(dist.irecv, theirs, group=stages.group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        mine.add_(theirs)
