"""Builds the parts of a rank for another plan, hands the state over to them, and frees the old parts.

If the device has no room for both states, the old one is in host memory meanwhile. Whole storages are moved, so views
of them, tied parameters and flat buffers stay what they are. The old parts keep their tensors, which have no memory
until `restore`.
"""

import gc
import sys
import time
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.distributed import distributed_c10d  # private in torch: the table of all groups

from trimaran.checkpoint import ROUND_BYTES, HeldState, MemorySource, match_shards, refuse_unused_tensors
from trimaran.checkpoint.hand_over import hand_over
from trimaran.core import DEVICE_TRAITS, UserError, show_bytes
from trimaran.machine import free_bytes
from trimaran.parallel import TensorShard, all_gather_int64, all_gather_json, build_mesh, forget_meshes
from trimaran.runs import closed_listeners, reach_phase
from trimaran.train.build import WorkerParts, connect_parts, connect_trainer, load_data
from trimaran.train.checkpointing.training_state import MAY_BE_UNUSED, TrainingState
from trimaran.train.process.rank_setup import set_expandable_segments
from trimaran.train.rank_context import RankContext
from trimaran.train.rank_networks import build_empty_networks
from trimaran.train.steppers.stepper import TorchStepper
from trimaran.train.steppers.torch_engine import connect_stepper


class FailedChangeError(Exception):
    """The change failed on some rank, and all ranks know. The text says where and why."""


class StepCopies(Protocol):
    """The copies of the state in memory: a `Checkpointer`, or none."""

    def open_copy(self, step: int) -> MemorySource | None:
        """See `Checkpointer.open_copy`."""

    def wait_until_copied(self) -> None:
        """Return when no copy reads the state any more."""


Agree = Callable[[Callable[[], Any]], Any]
"""Calls a function that uses no collectives, and raises on all ranks if it raised on one."""


def change_in_place(context: RankContext, parts: WorkerParts, agree: Agree) -> WorkerParts:
    """Return the parts of a plan that `is_in_place` allows: networks, optimizer and process groups stay."""
    old, networks, ranks = parts.trainer, parts.networks, parts.ranks
    assert isinstance(old.stepper, TorchStepper), "other engines do not change their plan"
    set_expandable_segments(context.recipe.faults.expandable_segments, context.rank_info.device)
    training_data = parts.training_data
    if _batch_settings(context) != _batch_settings(parts.context):
        training_data = agree(lambda: load_data(context, ranks, networks))
    clear_gradients(parts)
    plan, before = context.plan, parts.context.plan
    for network in networks:
        if plan.recompute != before.recompute:
            from trimaran.parallel.memory.recompute import change_recompute  # noqa: PLC0415

            change_recompute(network, plan, ranks)
        if plan.comm.prefetch != before.comm.prefetch:
            from trimaran.parallel.axes.fsdp import change_prefetch  # noqa: PLC0415

            change_prefetch(network, plan)
        if plan.comm.bucket_mb != before.comm.bucket_mb:
            from trimaran.parallel.axes.ddp import change_buckets  # noqa: PLC0415

            change_buckets(network, plan, ranks)
    stepper_context = replace(old.stepper.context, plan=plan, objective=training_data.objective)
    stepper = connect_stepper(stepper_context, old.stepper.updater)
    parts.instruments.follow(networks)
    compare = old.check.compare_replicas
    trainer = connect_trainer(context, ranks, networks, training_data, parts.instruments, stepper, compare)
    return replace(parts, context=context, trainer=trainer, training_data=training_data)


def _batch_settings(context: RankContext) -> tuple[Any, ...]:
    """Return what the batches of a rank depend on, of what may change in place."""
    plan = context.plan
    return context.recipe.data, plan.micro_batch, plan.micro_batches, plan.grad_accum


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

    `copies` are those of the state in memory. `shards` are those of `old` if their values are in host memory, see
    `StagedState`. Otherwise a rank holds both states and two buffers of the exchange until `release_state(old)`. It
    then holds no gradients and no activations. New networks get memory without values: nothing is read from disk or
    drawn at random.
    """
    recipe, plan, rank_info = context.recipe, context.plan, context.rank_info
    set_expandable_segments(recipe.faults.expandable_segments, rank_info.device)
    forget_meshes()  # torch would give new tensors an equal mesh of the old plan, whose process groups will be gone
    with closed_listeners():
        ranks = build_mesh(plan.mesh, device_type=rank_info.device.type)
    networks = agree(lambda: build_empty_networks(recipe, plan, rank_info, ranks))
    training_data = agree(lambda: load_data(context, ranks, networks))

    def build() -> WorkerParts:
        old.instruments.follow(networks)
        return connect_parts(context, ranks, networks, training_data, old.instruments, old.checkpoint.base)

    parts: WorkerParts = agree(build)
    held = HeldState(shards if shards is not None else held_shards(old, with_base=_hands_base_over(old)), step=step)
    state, with_base = parts.checkpoint.state, _hands_base_over(parts)
    forget_meshes()  # of the old tensors

    def find_targets() -> list[TensorShard]:
        base_shards = state.base_shards() if with_base and isinstance(state, TrainingState) else []
        found = [*state.shards_from(held.index), *base_shards]
        match_shards(found, held)  # raises here, where all ranks agree on it
        return found

    targets: Sequence[TensorShard] = agree(find_targets)
    # On CPUs, and on GPUs that several ranks share, collectives of ranks of one node would go through sockets.
    shares_cores = DEVICE_TRAITS[rank_info.device.type].shares_cores
    uses_sockets = shares_cores or rank_info.local_world_size > torch.cuda.device_count()
    memory = copies.open_copy(step) if uses_sockets else None
    reach = partial(reach_phase, context.run, rank_info.rank)
    reach("build")
    hand_over(held, targets, parts.trainer.device, memory, at_half=lambda: reach("hand-over"))
    try:
        refuse_unused_tensors(targets, held, gather=all_gather_int64, allowed=MAY_BE_UNUSED)
    except UserError as error:  # the same on all ranks
        raise FailedChangeError(f"{error.code}: {error.what}") from None
    state.restore(progress)
    return parts


def held_shards(parts: WorkerParts, *, with_base: bool) -> list[TensorShard]:
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
    for shard in held_shards(parts, with_base=True):
        if isinstance(shard.tensor, Tensor) and (storage := shard.tensor.untyped_storage()).resizable():
            storage.resize_(0)
    forget_meshes()


def forget_compiled(is_compiled: bool) -> None:
    """Free what was compiled for earlier parts, if anything was: torch limits how often one function is compiled."""
    if is_compiled and "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def free_earlier_parts() -> None:
    """Free the modules of parts that nobody uses any more. They refer to each other: only a collection finds them."""
    forget_meshes()  # torch's caches refer to meshes, and these to process groups
    gc.unfreeze()  # a capture of CUDA graphs froze everything that existed then
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def known_groups() -> dict[str, dist.ProcessGroup]:
    """Return the groups that this rank is in, by name, without the default group."""
    world: Any = distributed_c10d._world
    return {name: group for group, name in world.pg_names.items() if group is not dist.group.WORLD}


def destroy_groups(groups: Iterable[str]) -> None:
    """Destroy these groups, those that were made last first. All their ranks must do so, and nobody uses them."""
    found = known_groups()

    def age(name: str) -> tuple[int, str]:
        return (int(name), "") if name.isdigit() else (0, name)

    for name in sorted({*groups} & found.keys(), key=age, reverse=True):
        dist.destroy_process_group(found[name])


def collective_counts() -> dict[str, list[int]]:
    """Return for each group of this rank how many collectives it has started there, by backend.

    If these are equal on all ranks, no rank waits for another in a collective that the other never starts.
    """
    groups: dict[str, Any] = known_groups() | {"": dist.group.WORLD}
    counts: dict[str, list[int]] = {name: [] for name in groups}
    for name, group in groups.items():
        for kind in ("cpu", "cuda"):
            with suppress(RuntimeError, AttributeError):  # it has no backend for this kind of device
                backend = group._get_backend(torch.device(kind))
                counts[name].append(int(backend._get_sequence_number_for_group()))
    return counts


STATE_TERMS = ("weights", "masters", "optimizer")  # of a prediction's memory
USABLE_FRACTION = 0.95  # of free memory: what is free is not in one piece
RAN_OUT = torch.OutOfMemoryError.__name__
STAGE = "stage"  # the part of a pause


class StagedState:
    """A rank's state in host memory. `shards` are those of the state, with their values there."""

    def __init__(self, shards: Sequence[TensorShard]) -> None:
        self._moved: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}
        self.shards: list[TensorShard] = []
        for shard in shards:
            tensor, staged = shard.tensor, shard
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()).resizable():
                if storage._cdata not in self._moved:
                    host = UntypedStorage(storage.nbytes())
                    host.copy_(storage)
                    self._moved[storage._cdata] = storage, host
                _, host = self._moved[storage._cdata]
                place: Any = host, tensor.storage_offset(), tensor.size(), tensor.stride()
                staged = replace(shard, tensor=torch.empty(0, dtype=tensor.dtype).set_(*place))
            self.shards.append(staged)
        for storage, _ in self._moved.values():
            storage.resize_(0)

    def restore(self) -> None:
        for storage, host in self._moved.values():
            storage.resize_(host.nbytes())
            storage.copy_(host)
        self._moved.clear()


def rebuild_with_room(
    context: RankContext,
    old: WorkerParts,
    copies: StepCopies,
    progress: dict[str, Any],
    step: int,
    agree: Agree,
    seconds: MutableMapping[str, float],
) -> WorkerParts:
    """Return `rebuild`. If both states do not fit on the device, the old one is in host memory meanwhile.

    If the predicted room turns out too small, it is tried again that way. If building fails, `old` is restored before
    the error is raised. `seconds` gets the time to move the state.
    """
    if all(all_gather_json(has_room(context))):
        groups, why = {*known_groups()}, ""
        try:
            return rebuild(context, old, copies, progress, step, agree)
        except FailedChangeError as error:
            why = str(error)  # the error itself holds frames, and these the parts that were built
        if RAN_OUT not in why:
            raise FailedChangeError(why)
        free_earlier_parts()
        destroy_groups(known_groups().keys() - groups)
    began = time.monotonic()
    copies.wait_until_copied()  # copies in memory read the state
    shards = held_shards(old, with_base=_hands_base_over(old))
    agree(lambda: refuse_without_host_room(shards, num_ranks=context.rank_info.local_world_size))
    staged = StagedState(shards)
    free_earlier_parts()
    seconds[STAGE] = time.monotonic() - began
    why = ""
    try:
        return rebuild(context, old, copies, progress, step, agree, staged.shards)
    except FailedChangeError as error:
        why = str(error)
    free_earlier_parts()
    staged.restore()
    raise FailedChangeError(why)


def has_room(context: RankContext) -> bool:
    """Return whether this rank's device has memory for the state of the new plan beside what is there now."""
    device, prediction = context.rank_info.device, context.plan.prediction
    if prediction is None or not DEVICE_TRAITS[device.type].has_own_memory:  # the state of a CPU is in host memory
        return True
    state = sum(prediction.memory.get(term, 0.0) for term in STATE_TERMS)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for later
    return state + min(state, 2 * ROUND_BYTES) <= USABLE_FRACTION * (torch.cuda.mem_get_info(device)[0] + kept)


def refuse_without_host_room(shards: Sequence[TensorShard], *, num_ranks: int) -> None:
    tensors = [shard.tensor for shard in shards if isinstance(shard.tensor, Tensor)]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    needed, free = num_ranks * sum(storages.values()), free_bytes()
    if needed > USABLE_FRACTION * free:
        raise UserError("S046.device-no-room", where="plan", free=show_bytes(free), needed=show_bytes(needed))
