"""Checkpoints of a user's own loop, in the format of `trimaran train`, saved and loaded when the loop asks for it."""

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
from trimaran.checkpoint.ownership import assign_rows
from trimaran.checkpoint.rank_layout import barrier, exchange_rank_layout
from trimaran.checkpoint.rank_share import build_share, copy_to_memory
from trimaran.checkpoint.saver import Saver, SaveRequest, TorchStore
from trimaran.checkpoint.step_dirs import remove_drafts
from trimaran.core import CheckpointSection, Plan, Recipe, UserError
from trimaran.parallel.comm.json_exchange import all_gather_int64, all_gather_json, broadcast_json
from trimaran.train.checkpointing.restore import Restorer
from trimaran.train.checkpointing.training_state import TrainingState, persistent_buffers

log = logging.getLogger(__name__)

ANY_STEP = 10**17  # no run has as many steps
JSON_TYPES = (bool, int, float, str, type(None))


class LoopCheckpointer:
    """Saves and loads the checkpoints of one folder. Every rank must call `save` and `resume`."""

    def __init__(self, folder: Path, state: "LoopState", plan: Plan) -> None:
        self._folder, self._state = folder, state
        self._rank_layout = exchange_rank_layout(dist.get_rank(), _local_rank())
        about: dict[str, Any] = {"world_size": dist.get_world_size(), "plan": plan.model_dump(mode="json")}
        self._saver = Saver(
            folder,
            self._rank_layout,
            TorchStore(_get_default_store()),
            CheckpointSection(),
            lambda order: Manifest(step=order.step, progress=order.progress, time=time.time(), **about),
        )
        self._saver.nonce = broadcast_json(secrets.token_hex(4))

    def save(self, step: int) -> Path:
        """Write a checkpoint and return its folder once it is complete and verified. All ranks raise, or none does."""
        self._state.gather()
        shards, world_size = self._state.shards(), self._rank_layout.world_size
        rows = assign_rows(shards, rank=self._rank_layout.rank, world_size=world_size, gather=all_gather_int64)
        share = build_share(shards, rows)
        memory = torch.empty(share.num_bytes, dtype=torch.uint8)
        copy_to_memory(share, shards, memory)
        self._saver.start(SaveRequest(step=step, share=share, memory=memory, progress=self._state.progress()))
        self._saver.wait()
        (result,) = self._saver.results()
        if result.failed:
            raise UserError("K032", f"step {step} was not saved: {result.failed}", where=str(self._folder),
                            fix="fix the cause and save again; earlier checkpoints are unchanged")  # fmt: skip
        return Path(result.path)

    def resume(self) -> int:
        """Load the newest complete checkpoint and return its step; 0 when there is none."""
        if self._rank_layout.rank == 0:
            with suppress(OSError):  # the disk may be read-only
                remove_drafts(self._folder, DurableDisk())
        barrier()
        restorer = Restorer(self._state, self._folder, self._rank_layout, Recipe())
        return restorer.load(CopyFinder((), self._rank_layout), newest=ANY_STEP).step


class LoopState(TrainingState):
    """The checkpointed state of a user's model and optimizer, with parameter-group settings and RNG states.

    Buffers are rank 0's, as in DDP. Each rank has its own RNG state; it is not restored on another number of ranks.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        self._rng = RngStates(device)
        counters = {"optimizer": ParamGroupSettings(optimizer), "random": self._rng}
        super().__init__([model], optimizer, counters=counters, settings={})
        self._shared = [buffer for _, buffer in persistent_buffers(model)]

    def gather(self) -> None:
        super().gather()
        for buffer in self._shared:
            dist.broadcast(buffer, src=0)
        self._rng.gather()

    def progress(self) -> dict[str, Any]:
        return super().progress() | {"states": self._optimizer.numbers()}

    def restore(self, progress: Mapping[str, Any]) -> None:
        super().restore(progress)
        self._optimizer.restore_numbers(progress.get("states", {}))


class ParamGroupSettings:
    """The learning rate and other settings of each parameter group, which a scheduler may have changed."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def state(self) -> dict[str, Any]:
        return {"groups": [_json_settings(group) for group in self._optimizer.param_groups]}

    def restore(self, state: Mapping[str, Any]) -> None:
        for group, saved in zip(self._optimizer.param_groups, state["groups"], strict=True):
            for key, value in saved.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(value, list) else value


def _json_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that JSON can hold: numbers, text and lists of them."""
    values = {key: value.tolist() if isinstance(value, Tensor) else value for key, value in group.items()}
    return {
        key: value
        for key, value in values.items()
        if key not in ("params", "param_names")
        and all(isinstance(each, JSON_TYPES) for each in (value if isinstance(value, (tuple, list)) else [value]))
    }


class RngStates:
    """The states of torch's random number generators on all ranks, as base64 text."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: list[list[str]] = []

    def gather(self) -> None:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        self._states = all_gather_json([base64.b64encode(each.numpy().tobytes()).decode() for each in states])

    def state(self) -> dict[str, Any]:
        return {"ranks": self._states}

    def restore(self, state: Mapping[str, Any]) -> None:
        ranks = state["ranks"]
        if len(ranks) != dist.get_world_size():
            log.warning(
                "saved by %d ranks, loaded by %d: RNG states are not restored", len(ranks), dist.get_world_size()
            )
            return
        states = [bytearray(base64.b64decode(each)) for each in ranks[dist.get_rank()]]
        cpu, *cuda = (torch.frombuffer(each, dtype=torch.uint8) for each in states)
        torch.set_rng_state(cpu)
        if cuda and self._device.type == "cuda":
            torch.cuda.set_rng_state(cuda[0], self._device)


def _local_rank() -> int:
    return dist.get_node_local_rank(fallback_rank=0)
