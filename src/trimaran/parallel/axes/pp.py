"""Pipeline parallelism: each rank holds some of the layers, and micro-batches pass from stage to stage."""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from trimaran.parallel.axes.image_split import dealt_towers
from trimaran.parallel.gradient_norm import local_gradient
from trimaran.parallel.mesh import RankMesh
from trimaran.parallel.tower_plan import tower_of

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

    `streams` are like what comes in and what leaves. Left alone, torch would find out by a trial step at the start, and
    send it pickled. The methods are torch's own; each lets the time it takes be known.
    """

    def __init__(
        self,
        module: nn.Module,
        number: int,
        stages: StageMap,
        *,
        streams: tuple[Tensor, Tensor],
        compute: Compute,
        watch: Watch,
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


def empty_streams(
    network: Network, ranks: RankMesh, inputs: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return room for what comes into a stage and for what leaves it, for one micro-batch of `inputs`."""
    shapes = network.stream_shape(inputs, tp=ranks.degrees.tp)
    entering, leaving = (torch.empty(shape, dtype=dtype, device=ranks.device, requires_grad=True) for shape in shapes)
    return entering, leaving


def relay(stages: StageMap, computes: Sequence[Compute], entering: Sequence[Tensor]) -> Tensor | None:
    """Return what the last stage makes of one micro-batch, forward only; None on ranks without that stage.

    The schedules are made for one shape and for backward; this is for the rest. `computes` are of the stages here, and
    `entering` is like what comes into each of them.
    """
    given: tuple[Tensor, ...] = ()
    for number, compute, stream in zip(stages.here, computes, entering, strict=True):
        if number > 0 and number - 1 not in stages.here:
            arrived = torch.empty_like(stream, requires_grad=False)
            dist.recv(arrived, group=stages.group, group_src=stages.owners[number - 1])
            given = (arrived,)
        given = (compute(*given),)
        if number < stages.last and number + 1 not in stages.here:
            dist.send(given[0], group=stages.group, group_dst=stages.owners[number + 1])
    return given[0] if stages.has_last else None


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What every rank of a pipeline knows of all its stages."""

    first_trained: int  # the first stage that has something to train: nobody before it needs a gradient
    tied: tuple[int, ...]  # the stages with the two copies of an embedding that is the head as well

    def needs_gradient(self, stage: int) -> bool:
        """Return whether something before this stage is trained, so that the gradient of what comes in is of use."""
        return stage > self.first_trained


def survey_stages(networks: Sequence[Network], stages: StageMap, device: torch.device) -> StageFacts:
    """Return what all ranks of the pipeline find in their stages. Every rank must call."""
    table = torch.zeros(len(stages.owners), 2, dtype=torch.int32, device=device)
    for number, network in zip(stages.here, networks, strict=True):
        trained = any(each.requires_grad for each in network.module.parameters())
        copy = _tied_embedding(network.module)
        table[number, 0], table[number, 1] = trained, copy is not None and copy.requires_grad
    dist.all_reduce(table, group=stages.group)
    trained, tied = ([number for number, found in enumerate(row) if found] for row in table.T.tolist())
    return StageFacts(first_trained=trained[0], tied=tuple(tied))


@dataclass(frozen=True, slots=True)
class Trained:
    """What this rank trains: its parameters by tower, and those of whose gradient each tp rank knows an addend.

    All ranks name the same towers, and may hold nothing of some.
    """

    towers: Mapping[str, Sequence[nn.Parameter]]
    addends: Sequence[nn.Parameter] = ()

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [each for held in self.towers.values() for each in held]


def trained_parameters(networks: Sequence[Network], plan: Plan) -> Trained:
    """Return what is trained here, once: the last stage's copy of a tied embedding is counted by the other stage."""
    towers, dealt = networks[0].towers, dealt_towers(networks[0], plan)
    found: dict[str, list[nn.Parameter]] = {tower: [] for tower in towers}
    for network in networks:
        decoder = _decoder(network.module)
        copy = _tied_embedding(network.module) if decoder is not None and decoder.is_last else None
        for name, each in network.module.named_parameters():
            if each.requires_grad and each is not copy:
                found[tower_of(name, towers)].append(each)
    return Trained(found, [each for tower in dealt for each in found[tower]])


def sum_tied_gradients(networks: Sequence[Network], stages: StageMap, facts: StageFacts) -> None:
    """Give both copies of a tied embedding the sum of their gradients, shard by shard, so that they move alike."""
    here = {number: network for number, network in zip(stages.here, networks, strict=True) if number in facts.tied}
    copies = [_tied_embedding(network.module) for network in here.values()]
    gradients = [local_gradient(weight)[0] for weight in copies if weight is not None]
    if len(gradients) == 2:  # both are here, as in the shape of a V
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


def _decoder(module: nn.Module) -> Decoder | None:
    """Return our decoder, which may be a tower of something larger; None in a network or a stage without it."""
    return next((each for each in module.modules() if isinstance(each, Decoder)), None)


def _tied_embedding(module: nn.Module) -> nn.Parameter | None:
    """Return the embedding that is the head as well, where this stage has a copy of it and another stage the other."""
    decoder = _decoder(module)
    if decoder is None or not decoder.spec.tied or decoder.is_first == decoder.is_last or decoder.embed_tokens is None:
        return None
    (weight,) = decoder.embed_tokens.parameters()
    return weight
