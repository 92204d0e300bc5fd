"""Moves the old state to host memory while a change hands it over, if the device has no room for both states.

Whole storages are moved, so views of them, tied parameters and flat buffers stay what they are. The old parts keep
their tensors, which have no memory until `restore`.
"""

import time
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from trimaran.checkpoint.hand_over import ROUND_BYTES
from trimaran.core import Plan, UserError, show_bytes
from trimaran.core.traits import DEVICE_TRAITS
from trimaran.machine.host_limits import free_bytes
from trimaran.parallel.comm.json_exchange import all_gather_json
from trimaran.parallel.tensor_shards import TensorShard
from trimaran.train.build import WorkerParts
from trimaran.train.features.live_change.process_groups import destroy_groups, known_groups
from trimaran.train.features.live_change.rebuild import (
    Agree,
    FailedChangeError,
    StepCopies,
    free_earlier_parts,
    held_shards,
    rebuild,
)
from trimaran.train.rank_context import RankContext

STATE_TERMS = ("weights", "masters", "optimizer")  # of a prediction's memory
USABLE_FRACTION = 0.95  # of free memory: what is free is not in one piece
RAN_OUT = torch.OutOfMemoryError.__name__
STAGE = "stage"  # the part of a pause


class StagedState:
    """A rank's state in host memory. `shards` are those of the state, with their values there."""

    def __init__(self, shards: Sequence[TensorShard]) -> None:
        self._moved: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}
        self.shards = [self._staged(shard) for shard in shards]
        for storage, _ in self._moved.values():
            storage.resize_(0)

    def _staged(self, shard: TensorShard) -> TensorShard:
        """Return the shard with its values in host memory, unless its tensor has a form of its own."""
        tensor = shard.tensor
        if not isinstance(tensor, Tensor) or not (storage := tensor.untyped_storage()).resizable():
            return shard
        if storage._cdata not in self._moved:
            host = UntypedStorage(storage.nbytes())
            host.copy_(storage)
            self._moved[storage._cdata] = storage, host
        _, host = self._moved[storage._cdata]
        view = torch.empty(0, dtype=tensor.dtype)
        view.set_(host, tensor.storage_offset(), tensor.size(), tensor.stride())  # pyrefly: ignore[no-matching-overload]
        return replace(shard, tensor=view)

    def restore(self) -> None:
        """Give the tensors of the state their memory and values back."""
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
    """Return what `rebuild` returns. If both states do not fit on the device, the old one is in host memory meanwhile.

    Where the room is predicted to be enough but is not, it is tried again that way. If building fails, `old` is as it
    was before the error is raised. `seconds` gets the time to move the state.
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
    shards = held_shards(old)
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
    free, needed = free_device_bytes(context.rank_info.device), new_state_bytes(context.plan)
    return free is None or needed is None or needed <= USABLE_FRACTION * free


def new_state_bytes(plan: Plan) -> float | None:
    """Return what the state of a plan and the buffers of the exchange need on the device; None if it is not known."""
    if plan.prediction is None:
        return None
    state = sum(plan.prediction.memory.get(term, 0.0) for term in STATE_TERMS)
    return state + min(state, 2 * ROUND_BYTES)


def free_device_bytes(device: torch.device) -> int | None:
    """Return the free memory of a GPU, with what torch keeps for later; None for a CPU: its state is in host memory."""
    if not DEVICE_TRAITS[device.type].has_own_memory:
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def refuse_without_host_room(shards: Sequence[TensorShard], *, num_ranks: int) -> None:
    """Raise if host memory has no room for the states of the `num_ranks` ranks of this node."""
    tensors = [shard.tensor for shard in shards if isinstance(shard.tensor, Tensor)]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    needed, free = num_ranks * sum(storages.values()), free_bytes()
    if needed > USABLE_FRACTION * free:
        raise UserError("S046", "the device has no room for the states of both plans, and host memory has "
                        f"{show_bytes(free)} free for the old one, which needs {show_bytes(needed)}",
                        where="plan", fix="stop the run, and resume it with the new plan")  # fmt: skip
