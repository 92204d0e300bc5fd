"""Builds the parts of another plan beside those of the current one, and hands the state over to them."""

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from trimaran.checkpoint.hand_over import HeldState, hand_over
from trimaran.checkpoint.load_state import match_shards, refuse_unused_tensors
from trimaran.checkpoint.memory_copies import MemorySource
from trimaran.core import Plan, UserError
from trimaran.core.traits import DEVICE_TRAITS
from trimaran.parallel import build_mesh
from trimaran.parallel.axes.stage_map import map_stages
from trimaran.parallel.comm.json_exchange import all_gather_int64
from trimaran.parallel.mesh import forget_meshes
from trimaran.parallel.tensor_shards import TensorShard
from trimaran.runs.change_phases import reach_phase
from trimaran.runs.gloo_listeners import closed_listeners
from trimaran.train.build import WorkerParts, build_trainer, connect_trainer, load_data
from trimaran.train.checkpointing.inputs import CheckpointInputs
from trimaran.train.checkpointing.training_state import MAY_BE_UNUSED, TrainingState
from trimaran.train.process.rank_info import RankInfo
from trimaran.train.process.torch_modes import set_expandable_segments
from trimaran.train.rank_context import RankContext
from trimaran.train.rank_networks import build_empty_networks, reload_base
from trimaran.train.steppers.stepper import TorchStepper
from trimaran.train.steppers.torch_engine import connect_stepper
from trimaran.train.trainer import Trainer


class FailedChangeError(Exception):
    """The change failed on some rank, and all ranks know. The text says where and why."""


class StepCopies(Protocol):
    """The copies of the state in memory: a `Checkpointer`, or none."""

    def open_copy(self, step: int) -> MemorySource | None:
        """See `Checkpointer.open_copy`."""
        ...

    def wait_until_copied(self) -> None:
        """Return when no copy reads the state any more."""


Agree = Callable[[Callable[[], Any]], Any]
"""Calls a function that uses no collectives, and raises on all ranks if it raised on one."""


def change_in_place(context: RankContext, parts: WorkerParts, agree: Agree) -> WorkerParts:
    """Return the parts of a plan that `is_in_place` allows, or of other settings of the loader or the checkpoints.

    Networks, optimizer and process groups stay. The data, the stepper and what reports steps are new.
    """
    old, networks, ranks = parts.trainer, parts.networks, parts.ranks
    assert isinstance(old.stepper, TorchStepper), "other engines do not change their plan"
    set_expandable_segments(context.recipe.faults.expandable_segments, context.rank_info.device)
    training_data = parts.training_data
    if _batch_settings(context) != _batch_settings(parts.context):
        training_data = agree(lambda: load_data(context, ranks, networks))
    clear_gradients(parts)
    _change_networks(context.plan, parts)
    stepper = connect_stepper(networks, context.plan, ranks, old.stepper.updater, old.clock, training_data.objective)
    parts.instruments.follow(networks)
    trainer = connect_trainer(
        context,
        ranks,
        networks,
        training_data,
        parts.instruments,
        stepper,
        old.check.compare_replicas,
    )
    stages = map_stages(context.plan, ranks)
    return replace(parts, context=context, trainer=trainer, training_data=training_data, stages=stages)


def _batch_settings(context: RankContext) -> tuple[Any, ...]:
    """Return what the batches of a rank depend on, of what may change in place."""
    plan = context.plan
    return context.recipe.data, plan.micro_batch, plan.micro_batches, plan.grad_accum


def _change_networks(plan: Plan, parts: WorkerParts) -> None:
    """Change recompute, prefetch and buckets of the networks as they are. All ranks call."""
    before = parts.context.plan
    for network in parts.networks:
        if plan.recompute != before.recompute:
            from trimaran.parallel.memory.recompute import change_recompute  # noqa: PLC0415

            change_recompute(network, plan, parts.ranks)
        if plan.comm.prefetch != before.comm.prefetch:
            from trimaran.parallel.axes.fsdp import change_prefetch  # noqa: PLC0415

            change_prefetch(network, plan)
        if plan.comm.bucket_mb != before.comm.bucket_mb:
            from trimaran.parallel.axes.ddp import change_buckets  # noqa: PLC0415

            change_buckets(network, plan, parts.ranks)


def rebuild(
    context: RankContext,
    old: WorkerParts,
    copies: StepCopies,
    progress: dict[str, Any],
    step: int,
    agree: Agree,
    shards: Sequence[TensorShard] | None = None,
) -> WorkerParts:
    """Return the parts of the plan in `context`, with the state that `old` holds. `old` stays as it is.

    `copies` are those of the state in memory. `shards` are those of `old` if their values are elsewhere, see
    `staged_state`. Otherwise, until `release_state(old)` a rank holds both states, and two buffers of the exchange, but
    no gradients and no activations. Networks get memory without values: nothing is read from disk, and nothing is
    drawn.
    """
    recipe, plan, rank_info = context.recipe, context.plan, context.rank_info
    set_expandable_segments(recipe.faults.expandable_segments, rank_info.device)
    forget_meshes()  # torch would give new tensors an equal mesh of the old plan, whose process groups will be gone
    with closed_listeners():
        ranks = build_mesh(plan.mesh, device_type=rank_info.device.type)
    networks = agree(lambda: build_empty_networks(recipe, plan, rank_info, ranks))
    training_data = agree(lambda: load_data(context, ranks, networks))
    base = old.checkpoint.base.of_networks(partial(reload_base, networks, recipe, plan, rank_info))

    def build() -> tuple[Trainer, CheckpointInputs]:
        old.instruments.follow(networks)
        return build_trainer(context, ranks, networks, training_data, old.instruments, base)

    trainer, checkpoint = agree(build)
    parts = WorkerParts(
        context=context,
        networks=networks,
        ranks=ranks,
        stages=map_stages(plan, ranks),
        training_data=training_data,
        instruments=old.instruments,
        trainer=trainer,
        checkpoint=checkpoint,
        seconds={},
    )
    held = HeldState(shards if shards is not None else held_shards(old), step=step)
    _fill(parts, old, copies, held, progress, agree)
    return parts


def held_shards(parts: WorkerParts) -> list[TensorShard]:
    """Return the shards that this rank hands over."""
    return state_shards(parts, with_base=_hands_base_over(parts))


def _fill(
    new: WorkerParts, old: WorkerParts, copies: StepCopies, held: HeldState, progress: dict[str, Any], agree: Agree
) -> None:
    state, with_base = new.checkpoint.state, _hands_base_over(new)
    forget_meshes()  # of the old tensors

    def targets() -> list[TensorShard]:
        base = state.base_shards() if with_base and isinstance(state, TrainingState) else []
        shards = [*state.shards_from(held.index), *base]
        match_shards(shards, held)  # raises here, where all ranks agree on it
        return shards

    shards: Sequence[TensorShard] = agree(targets)
    memory = copies.open_copy(held.step) if _uses_sockets(new.context.rank_info) else None
    reach = partial(reach_phase, new.context.run, new.context.rank_info.rank)
    reach("build")
    hand_over(held, shards, new.trainer.device, memory, at_half=lambda: reach("hand-over"))
    try:
        refuse_unused_tensors(shards, held, gather=all_gather_int64, allowed=MAY_BE_UNUSED)
    except UserError as error:  # the same on all ranks
        raise FailedChangeError(f"{error.code}: {error.what}") from None
    state.restore(progress)


def _uses_sockets(rank_info: RankInfo) -> bool:
    """Whether collectives of ranks of one node go through sockets: on CPUs, and on GPUs that several ranks share."""
    return DEVICE_TRAITS[rank_info.device.type].shares_cores or rank_info.local_world_size > torch.cuda.device_count()


def state_shards(parts: WorkerParts, *, with_base: bool = True) -> list[TensorShard]:
    """Return what this rank holds of the state, up to date, and of an adapter's base."""
    state = parts.checkpoint.state
    state.gather()
    base = state.base_shards() if with_base and isinstance(state, TrainingState) else []
    return [*state.shards(), *base]


def _hands_base_over(parts: WorkerParts) -> bool:
    """Whether the base of an adapter is handed over. One in 4 bits is read again, see `build_empty_networks`."""
    adapter = parts.trainer.recipe.model.adapter
    return adapter is not None and adapter.base != "4bit"


def clear_gradients(parts: WorkerParts) -> None:
    """Free the gradients, for example those of a step that failed."""
    for network in parts.networks:
        network.module.zero_grad(set_to_none=True)


def release_graphs(parts: WorkerParts) -> None:
    """Free the CUDA graphs of the stepper, and with them the memory that only they can use."""
    stepper = parts.trainer.stepper
    assert isinstance(stepper, TorchStepper), "other engines do not change their plan"
    stepper.release_graphs()


def release_state(parts: WorkerParts) -> None:
    """Free the memory of weights and optimizer states now, whoever still refers to their tensors."""
    clear_gradients(parts)
    for shard in state_shards(parts):
        if isinstance(shard.tensor, Tensor) and (storage := shard.tensor.untyped_storage()).resizable():
            storage.resize_(0)
    forget_meshes()


def forget_compiled(is_compiled: bool) -> None:
    """Free what was compiled for earlier parts, if anything was: torch limits how often one function is compiled."""
    if is_compiled and "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def forget_peak_memory() -> None:
    """Measure the peak of the device's memory from now on: that of earlier plans and of a change does not count."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def free_earlier_parts() -> None:
    """Free the modules of parts that nobody uses any more. They refer to each other: only a collection finds them."""
    forget_meshes()  # torch's caches refer to meshes, and these to process groups
    gc.unfreeze()  # a capture of CUDA graphs froze everything that existed then
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
