"""Checkpoints of one's own loop: the same format, kept and loaded when the loop says so."""

import base64
import logging
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.optim import Optimizer

from trimaran.checkpoint.durable import DurableDisk
from trimaran.checkpoint.find_copies import CopyFinder
from trimaran.checkpoint.manifest import Manifest
from trimaran.checkpoint.ownership import own
from trimaran.checkpoint.rank_layout import exchange_rank_layout, gather_numbers, gather_trees, meet, told_by_first
from trimaran.checkpoint.rank_share import copy_in, lay_out
from trimaran.checkpoint.saver import Order, Saver, StorePost
from trimaran.checkpoint.step_dirs import sweep_drafts
from trimaran.core import CheckpointSection, Plan, Recipe, UserError
from trimaran.train.checkpointing.restore import Restorer
from trimaran.train.checkpointing.training_state import TrainingState, persistent_buffers

log = logging.getLogger(__name__)

LAST = 10**17  # no run has as many steps
PLAIN = (bool, int, float, str, type(None))


class LoopCheckpointer:
    """Where a boat's checkpoints are: written by all ranks together, and found again."""

    def __init__(self, folder: Path, state: "LoopState", plan: Plan) -> None:
        self._folder, self._state, self._rank_layout = (
            folder,
            state,
            exchange_rank_layout(dist.get_rank(), _local_rank()),
        )
        about: dict[str, Any] = {"world_size": dist.get_world_size(), "plan": plan.model_dump(mode="json")}
        self._saver = Saver(
            folder,
            self._rank_layout,
            StorePost(_get_default_store()),
            CheckpointSection(),
            lambda order: Manifest(step=order.step, progress=order.progress, time=time.time(), **about),
        )
        self._saver.nonce = told_by_first(secrets.token_hex(4))

    def save(self, step: int) -> Path:
        """Write a checkpoint and return its folder once it is complete and read back. All ranks raise, or none."""
        self._state.gather()
        pieces, world_size = self._state.pieces(), self._rank_layout.world_size
        rows = own(pieces, rank=self._rank_layout.rank, world_size=world_size, gather=gather_numbers)
        share = lay_out(pieces, rows)
        memory = torch.empty(share.num_bytes, dtype=torch.uint8)
        copy_in(share, pieces, memory)
        self._saver.start(Order(step=step, share=share, memory=memory, progress=self._state.progress()))
        self._saver.wait()
        (outcome,) = self._saver.outcomes()
        if outcome.failed:
            raise UserError("K032", f"step {step} was not saved: {outcome.failed}", where=str(self._folder),
                            fix="mend that and save again; the checkpoints before it are as they were")  # fmt: skip
        return Path(outcome.path)

    def resume(self) -> int:
        """Load the newest checkpoint that is whole and return its step; 0 when there is none."""
        if self._rank_layout.rank == 0:
            with suppress(OSError):  # one may load from a disk that nothing can be written to
                sweep_drafts(self._folder, DurableDisk())
        meet()
        recall = Restorer(self._state, self._folder, self._rank_layout, Recipe())
        return recall.load(CopyFinder((), self._rank_layout), newest=LAST).step


class LoopState(TrainingState):
    """What is kept of somebody's model and optimizer: also the optimizer's settings, and torch's random numbers.

    Buffers are rank 0's, as under DDP. Random numbers are each rank's own; another number of ranks draws others.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        self._random = RandomNumbers(device)
        counters = {"optimizer": Settings(optimizer), "random": self._random}
        super().__init__([model], optimizer, counters=counters, facts={})
        self._shared = [buffer for _, buffer in persistent_buffers(model)]

    def gather(self) -> None:
        super().gather()
        for buffer in self._shared:
            dist.broadcast(buffer, src=0)
        self._random.gather()

    def progress(self) -> dict[str, Any]:
        return super().progress() | {"states": self._optimizer.numbers()}

    def restore(self, progress: Mapping[str, Any]) -> None:
        super().restore(progress)
        self._optimizer.restore_numbers(progress.get("states", {}))


class Settings:
    """Learning rate and the like, group by group, which a scheduler may have changed."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def state(self) -> dict[str, Any]:
        return {"groups": [_plain(group) for group in self._optimizer.param_groups]}

    def restore(self, state: Mapping[str, Any]) -> None:
        for group, kept in zip(self._optimizer.param_groups, state["groups"], strict=True):
            for key, value in kept.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(value, list) else value


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that JSON can hold: numbers, words and rows of them."""
    rows = {key: value.tolist() if isinstance(value, Tensor) else value for key, value in group.items()}
    return {
        key: value
        for key, value in rows.items()
        if key not in ("params", "param_names")
        and all(isinstance(each, PLAIN) for each in (value if isinstance(value, (tuple, list)) else [value]))
    }


class RandomNumbers:
    """Torch's generators of all ranks, as text."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: list[list[str]] = []

    def gather(self) -> None:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        self._states = gather_trees([base64.b64encode(each.numpy().tobytes()).decode() for each in states])

    def state(self) -> dict[str, Any]:
        return {"ranks": self._states}

    def restore(self, state: Mapping[str, Any]) -> None:
        ranks = state["ranks"]
        if len(ranks) != dist.get_world_size():
            log.warning("saved by %d ranks, loaded by %d: random numbers begin anew", len(ranks), dist.get_world_size())
            return
        texts = [bytearray(base64.b64decode(each)) for each in ranks[dist.get_rank()]]
        host, *on_device = (torch.frombuffer(each, dtype=torch.uint8) for each in texts)
        torch.set_rng_state(host)
        if on_device and self._device.type == "cuda":
            torch.cuda.set_rng_state(on_device[0], self._device)


def _local_rank() -> int:
    return dist.get_node_local_rank(fallback_rank=0)
