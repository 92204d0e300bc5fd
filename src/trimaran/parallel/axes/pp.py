"""Pipeline parallelism: each rank holds some of the layers, and micro-batches pass from stage to stage."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from trimaran.core import Plan
from trimaran.models.stages import stages_of_rank
from trimaran.nets import Decoder, Network
from trimaran.parallel.mesh import RankMesh
from trimaran.parallel.norm import local_gradient

Schedule = ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B | ScheduleZBVZeroBubble
Compute = Callable[..., Tensor]  # the stream in (the first stage has none), the stream out; inputs come by keyword
Watch = Callable[[str], AbstractContextManager[object]]  # notes the time spent in a phase


@dataclass(frozen=True, slots=True)
class StageMap:
    """Which rank of the pipeline holds which stage: `here` is this one's, `owners` the rank in `group` of each."""

    here: tuple[int, ...]
    owners: tuple[int, ...]
    group: dist.ProcessGroup

    @property
    def last(self) -> int:
        return len(self.owners) - 1

    @property
    def has_last(self) -> bool:
        return self.last in self.here


def map_stages(plan: Plan, ranks: RankMesh) -> StageMap:
    """Return who holds which stage; without a pipeline there is one."""
    held = [
        stages_of_rank(plan.pipeline.schedule, plan.mesh.pp, pp_rank, plan.num_stages)
        for pp_rank in range(plan.mesh.pp)
    ]
    owners = {stage: pp_rank for pp_rank, stages in enumerate(held) for stage in stages}
    here = held[ranks.rank("pp")]
    return StageMap(here, tuple(owners[stage] for stage in range(plan.num_stages)), ranks.group("pp"))


class Stage(PipelineStage):
    """A stage as torch's schedules want it: one tensor comes in and one goes out, which on the last stage is the loss.

    `stream` is like what passes between stages. Left alone, torch would find out by a trial step at the start, and send
    it pickled. The methods are torch's own; each lets the time it takes be known.
    """

    def __init__(
        self, module: nn.Module, number: int, stages: StageMap, *, stream: Tensor, compute: Compute, watch: Watch
    ) -> None:
        loss = torch.empty((), device="meta", requires_grad=True)
        super().__init__(
            module,
            number,
            len(stages.owners),
            stream.device,
            input_args=() if number == 0 else (stream,),
            output_args=(loss,) if number == stages.last else (stream,),
            group=stages.group,
        )
        self._compute, self._watch = compute, watch

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._compute(*args, **kwargs)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._watch("forward"), as_it_was():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self._watch("backward"), as_it_was():
            if not kwargs.get("full_backward", True):
                self._gather()
            super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self._watch("backward"), as_it_was():
            self._gather()
            super().backward_weight_one_chunk(*args, **kwargs)

    def perform_reduce_grad(self, *args: Any, **kwargs: Any) -> None:
        with self._watch("comm"):
            super().perform_reduce_grad(*args, **kwargs)

    def _gather(self) -> None:
        """Have the weights whole for a backward in two parts.

        It finds its way by the parameters that the module has at that moment. Shards, which FSDP puts in their place
        after a forward, are no part of the graph, and would get no gradient without a word.
        """
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.unshard()


@contextmanager
def as_it_was() -> Iterator[None]:
    """Let an error inside a stage out as it was. torch wraps it in one that tells shapes and hides what happened."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is None or "ailed to run" not in str(error):
            raise
        raise error.__cause__ from None


def build_schedule(plan: Plan, stages: list[Stage]) -> Schedule:
    """Return the plan's schedule over this rank's stages. It sums gradients over the micro-batches: law 1."""
    options: dict[str, Any] = {
        "n_microbatches": plan.grad_accum,
        "loss_fn": lambda loss, _: loss,
        "scale_grads": False,
    }
    match plan.pipeline.schedule:
        case "gpipe":
            return ScheduleGPipe(*stages, **options)
        case "1f1b":
            return Schedule1F1B(*stages, **options)
        case "interleaved":
            return ScheduleInterleaved1F1B(list(stages), **options)
        case "zero-bubble":
            return ScheduleZBVZeroBubble(list(stages), **options)


def empty_stream(network: Network, ranks: RankMesh, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return room for what passes between stages for `tokens` [B, T]: the hidden states of this rank's positions."""
    assert network.spec is not None, "only our own decoder is cut into stages"
    positions = network.context.mine(tokens).shape[1] // ranks.degrees.tp
    shape = (len(tokens), positions, network.spec.hidden)
    return torch.empty(shape, dtype=dtype, device=tokens.device, requires_grad=True)


def relay(stages: StageMap, computes: Sequence[Compute], stream: Tensor) -> Tensor | None:
    """Return what the last stage makes of one micro-batch, forward only; None on ranks without that stage.

    The schedules are made for one shape and for backward; this is for the rest. `computes` are of the stages here.
    """
    given: tuple[Tensor, ...] = ()
    for number, compute in zip(stages.here, computes, strict=True):
        if number > 0 and number - 1 not in stages.here:
            arrived = torch.empty_like(stream, requires_grad=False)
            dist.recv(arrived, group=stages.group, group_src=stages.owners[number - 1])
            given = (arrived,)
        given = (compute(*given),)
        if number < stages.last and number + 1 not in stages.here:
            dist.send(given[0], group=stages.group, group_dst=stages.owners[number + 1])
    return given[0] if stages.has_last else None


def counted_parameters(networks: Sequence[Network]) -> Iterator[nn.Parameter]:
    """Yield this rank's parameters once: the last stage's copy of a tied embedding is counted by the first stage."""
    for network in networks:
        copy = None
        if isinstance(network.module, Decoder) and not network.module.is_first:
            copy = _tied_embedding(network.module)
        yield from (each for each in network.module.parameters() if each.requires_grad and each is not copy)


def sum_tied_gradients(networks: Sequence[Network], stages: StageMap) -> None:
    """Give both copies of a tied embedding the sum of their gradients, shard by shard, so that they move alike."""
    modules = [network.module for network in networks if isinstance(network.module, Decoder)]
    copies = [weight for weight in map(_tied_embedding, modules) if weight is not None]
    gradients = [local_gradient(weight)[0] for weight in copies]
    if len(gradients) == 2:  # both are here, as in the shape of a V
        gradients[1].copy_(gradients[0].add_(gradients[1]))
    elif gradients:
        (mine,), theirs = gradients, torch.empty_like(gradients[0])
        peer = stages.owners[0 if stages.has_last else stages.last]
        exchange = [
            dist.P2POp(dist.isend, mine, group=stages.group, group_peer=peer),
            dist.P2POp(dist.irecv, theirs, group=stages.group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        mine.add_(theirs)


def _tied_embedding(module: Decoder) -> nn.Parameter | None:
    """Return the embedding that is the head as well, where this stage has a copy of it and another stage the other."""
    if not module.spec.tied or module.is_first == module.is_last or module.embed_tokens is None:
        return None
    (weight,) = module.embed_tokens.parameters()
    return weight
