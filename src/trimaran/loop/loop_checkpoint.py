"""Checkpoints of a user's own loop, in the format of `trimaran train`, saved and loaded when the loop asks for it."""

import base64
import json
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.optim import SGD, Optimizer

from trimaran.checkpoint import DurableDisk, Manifest, remove_drafts
from trimaran.checkpoint.rank_layout import barrier, exchange_rank_layout
from trimaran.checkpoint.saver import Saver, SaveRequest, TorchStore
from trimaran.core import CheckpointSection, Plan, UserError
from trimaran.core.traits import DEVICE_TRAITS
from trimaran.loop.loop_context import LoopContext, generator_states
from trimaran.loop.loop_evaluation import write_weights
from trimaran.loop.sharded_parts import copy_weights
from trimaran.parallel.comm.json_exchange import all_gather_int64, all_gather_json, broadcast_json
from trimaran.parallel.optimizer.optimizer_state import NamedParameters, OptimizerState
from trimaran.parallel.tensor_regions import TensorIndex
from trimaran.parallel.tensor_shards import TensorShard, assign_rows, build_share, copy_to_memory
from trimaran.train.checkpointing.tiers import restore_from_disk
from trimaran.train.checkpointing.training_state import TrainingState, persistent_buffers, restore_counters

log = logging.getLogger(__name__)

MAX_STATE_BYTES = 1 << 20  # of a tensor in the state of a scheduler or the like; it is kept in the manifest
COPY_KEY = re.compile(r"model/copy_(\d+)\.")
JSON_TYPES = (bool, int, float, str, type(None))


class SavedLoop:
    """A loop's ranks, and the files that it writes: weights, and checkpoints in the folders that it has named."""

    def __init__(self, plan: Plan, context: LoopContext, state: "LoopState") -> None:
        self.plan, self.device = plan, context.device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._context, self._state = context, state
        self._savers: dict[Path, Saver] = {}

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which should print and write."""
        return self.rank == 0

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole weights, on the CPU of the main rank; an empty dict on the others."""
        raise NotImplementedError

    def save_weights(self, file: str | Path) -> Path:
        """Write the whole weights and buffers, nothing else, to a .safetensors file; return its path.

        Every rank must call it. `model.load_state_dict(safetensors.torch.load_file(file))` loads them anywhere.
        """
        return write_weights(file, self.state_dict())

    def save(self, folder: str | Path, step: int, **others: Any) -> Path:
        """Write a checkpoint after `step` steps; return its folder once it is complete and verified.

        It holds the model, the optimizer, the scaler and the RNG states, and `others` with a `state_dict`: schedulers,
        loaders. Every rank must call it, between two steps. Only the newest two are kept.
        """
        saver, path = self._saver_of("loop.save()", folder, others)
        self._state.gather()
        shards = self._state.shards()
        rows = assign_rows(shards, rank=self.rank, world_size=self.world_size, gather=all_gather_int64)
        share = build_share(shards, rows)
        memory = torch.empty(share.num_bytes, dtype=torch.uint8)
        copy_to_memory(share, shards, memory)
        saver.start(SaveRequest(step=step, share=share, memory=memory, progress=self._state.progress()))
        saver.wait()
        (result,) = saver.results()
        if result.failed:
            raise UserError("K032.step-not-saved", where=str(path), step=step, failed=result.failed)
        return Path(result.path)

    def resume(self, folder: str | Path, **others: Any) -> int:
        """Load the newest complete checkpoint in `folder` and return its step; 0 when there is none.

        `others` are those of `save`, under the same names. Every rank must call it, before the first step. The number
        of ranks and the sharding may have changed since.
        """
        _, path = self._saver_of("loop.resume()", folder, others)
        if self.is_main:
            with suppress(OSError):  # the disk may be read-only
                remove_drafts(path, DurableDisk())
        barrier()
        self._context.num_steps = restore_from_disk(self._state, path, self._rank_layout).step
        return self._context.num_steps

    def _saver_of(self, call: str, folder: str | Path, others: dict[str, Any]) -> tuple[Saver, Path]:
        """Return the saver of `folder`, and its path, for a call that every rank must make."""
        self._meet(call)
        self._state.others, path = others, Path(folder).absolute()
        if path not in self._savers:
            self._rank_layout = exchange_rank_layout(self.rank, dist.get_node_local_rank(fallback_rank=0))
            about: dict[str, Any] = {"world_size": self.world_size, "plan": self.plan.model_dump(mode="json")}
            self._savers[path] = Saver(
                path,
                self._rank_layout,
                TorchStore(_get_default_store()),
                CheckpointSection(),
                lambda order: Manifest(step=order.step, progress=order.progress, time=time.time(), **about),
                nonce=broadcast_json(secrets.token_hex(4)),
            )
        return self._savers[path], path

    def _meet(self, call: str) -> None:
        """Wait until every rank makes this call."""


class LoopState:
    """The checkpointed state of a loop: its models and optimizers, scalers, RNG states and objects of the user's own.

    See `checkpoint.tensor_shards.CheckpointState`. The names of the first model's tensors are its own, those of the
    second begin with `model_2.`, and so on. Buffers are rank 0's, as in DDP; if a model `is_split` over ranks, each
    rank has those of its part.
    """

    def __init__(self, device: torch.device, *, is_split: bool = False) -> None:
        self._models, self._is_split = list[ModelState](), is_split
        self._copies, self._new_copies = list[CopyState](), list[CopyState]()
        self._rng = RngStates(device)
        self.others: Mapping[str, Any] = {}

    def add(self, model: nn.Module, optimizers: Sequence[Optimizer], scaler: torch.amp.GradScaler | None) -> None:
        """Add a model, before its first forward."""
        number = len(self._models) + 1
        named = model if number == 1 else nn.ModuleDict({f"model_{number}": model})
        self._models.append(ModelState(named, optimizers, scaler, shares_buffers=not self._is_split))

    def add_copy(self, copy: nn.Module, model: nn.Module) -> None:
        """Add a copy of `model`, before its first forward."""
        number = len(self._copies) + 1
        self._copies.append(CopyState(nn.ModuleDict({f"copy_{number}": copy}), model))

    def shards(self) -> list[TensorShard]:
        return [shard for each in (*self._models, *self._copies) for shard in each.shards()]

    def shards_from(self, index: TensorIndex) -> list[TensorShard]:
        models = [shard for model in self._models for shard in model.shards_from(index)]
        copies = [shard for copy in self._copies for shard in copy.shards_from(index)]
        # Copies that the checkpoint does not hold are new; it must not hold more than there are.
        of_models = {shard.key for shard in models}
        found = {int(match[1]) for key in index if key not in of_models and (match := COPY_KEY.match(key))}
        if len(found) > len(self._copies):
            raise UserError(
                "K085.checkpoint-holds-copies",
                where="loop.resume(folder, ...)",
                num_found=len(found),
                num__copies=len(self._copies),
            )
        self._new_copies = [copy for number, copy in enumerate(self._copies, 1) if number not in found]
        return [*models, *(shard for shard in copies if shard.key in index)]  # see `restore`

    def gather(self) -> None:
        for each in (*self._models, *self._copies):
            each.gather()
        self._rng.gather()

    def progress(self) -> dict[str, Any]:
        first, *more = (model.progress() for model in self._models)
        others = {}
        for name, each in self.others.items():
            is_generator = isinstance(each, torch.Generator)
            if not is_generator and not hasattr(each, "state_dict"):
                raise UserError("K033.no-state-dict", where="loop.save(folder, step, ...)", kind=type(each).__name__)
            others[name] = json.dumps(to_json(each.get_state() if is_generator else each.state_dict()))
        return first | {"random": self._rng.state(), "models": more, "others": others}

    def restore(self, progress: Mapping[str, Any]) -> None:
        saved = progress.get("others", {})
        if missing := sorted(saved.keys() - self.others.keys()):
            names = ", ".join(f"{name}={name}" for name in missing)
            raise UserError(
                "K033.resume-not-given", where="loop.resume(folder, ...)", missing=", ".join(missing), names=names
            )
        for model, each in zip(self._models, [progress, *progress.get("models", [])], strict=True):
            model.restore(each)
        for copy in self._copies:
            copy.restore({})
        for copy in self._new_copies:
            log.warning("the checkpoint has fewer copies of models: this one starts from its model")
            copy.start_over()
        restore_counters(progress, {"random": self._rng})
        for name, each in self.others.items():
            if name in saved:
                restore = each.set_state if isinstance(each, torch.Generator) else each.load_state_dict
                restore(from_json(json.loads(saved[name])))
            else:
                log.warning("the checkpoint has no state of %s: it starts over", name)


class ModelState(TrainingState):
    """The state of one model, its optimizers with the settings of their parameter groups, and its scaler."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None,
        *,
        shares_buffers: bool,
    ) -> None:
        counters: dict[str, Any] = {"optimizer": ParamGroupSettings(optimizers)}
        if scaler is not None:
            counters["scaler"] = ScalerState(scaler)
        super().__init__([model], optimizers[0], counters=counters, settings={})
        self._optimizer = OptimizerStates(optimizers, list(model.named_parameters()))
        self._shared = [buffer for _, buffer in persistent_buffers(model)] if shares_buffers else []

    def gather(self) -> None:
        super().gather()
        for buffer in self._shared:
            dist.broadcast(buffer, src=0)

    def progress(self) -> dict[str, Any]:
        return super().progress() | {"states": self._optimizer.numbers()}

    def restore(self, progress: Mapping[str, Any]) -> None:
        super().restore(progress)
        self._optimizer.restore_numbers(progress.get("states", {}))


class CopyState(TrainingState):
    """The weights of a copy of a model, which no optimizer trains."""

    def __init__(self, copy: nn.Module, model: nn.Module) -> None:
        super().__init__([copy], SGD(copy.parameters(), lr=0.0), counters={}, settings={})
        self._optimizer = OptimizerStates([], [])
        self._copy, self._model = copy, model

    def gather(self) -> None:
        for _, buffer in persistent_buffers(self._copy):
            dist.broadcast(buffer, src=0)

    def start_over(self) -> None:
        """Take the weights of the model."""
        copy_weights(self._model, self._copy, decay=0.0)


class OptimizerStates(OptimizerState):
    """The states of several optimizers, which train different parameters."""

    def __init__(self, optimizers: Sequence[Optimizer], named: NamedParameters) -> None:
        self._each = [OptimizerState(optimizer, named) for optimizer in optimizers]

    def tensors(self) -> Iterator[Tensor]:
        return (tensor for each in self._each for tensor in each.tensors())

    def shards(self) -> Iterator[TensorShard]:
        return (shard for each in self._each for shard in each.shards())

    def shards_from(self, index: TensorIndex) -> Iterator[TensorShard]:
        return (shard for each in self._each for shard in each.shards_from(index))

    def settle(self) -> None:
        for each in self._each:
            each.settle()

    def numbers(self) -> dict[str, dict[str, float]]:
        return {name: states for each in self._each for name, states in each.numbers().items()}

    def restore_numbers(self, numbers: Mapping[str, Mapping[str, float]]) -> None:
        for each in self._each:
            each.restore_numbers(numbers)

    def wait(self) -> None:
        for each in self._each:
            each.wait()


class ScalerState:
    """The loss scale of a GradScaler, and for how many steps it has not changed."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler

    def state(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def restore(self, state: Mapping[str, Any]) -> None:
        if state:  # that of a disabled scaler is empty
            self._scaler.load_state_dict(dict(state))


def to_json(value: Any) -> Any:
    """Return a state as JSON can hold it. Tuples, tensors and dicts with keys that are not text keep their type."""
    if isinstance(value, JSON_TYPES):
        return value
    if isinstance(value, list):
        return [to_json(each) for each in value]
    if isinstance(value, tuple):
        return {"type": "tuple", "value": [to_json(each) for each in value]}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {"type": kind, "value": [[to_json(key), to_json(each)] for key, each in value.items()]}
    if isinstance(value, Tensor) and value.nbytes <= MAX_STATE_BYTES:
        data = base64.b64encode(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        dtype = str(value.dtype).removeprefix("torch.")
        return {"type": "tensor", "value": data.decode(), "dtype": dtype, "shape": list(value.shape)}
    what = f"a tensor of {value.nbytes:,} bytes" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise UserError("K033.state-save-holds", where="loop.save(folder, step, ...)", text=what)


def from_json(value: Any) -> Any:
    """Return what `to_json` was given."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    match value["type"]:
        case "tuple":
            return tuple(from_json(each) for each in value["value"])
        case "tensor":
            data = torch.frombuffer(bytearray(base64.b64decode(value["value"])), dtype=torch.uint8)
            return data.view(getattr(torch, value["dtype"])).reshape(value["shape"])
    pairs = {from_json(key): from_json(each) for key, each in value["value"]}
    return Counter(pairs) if value["type"] == "counter" else pairs


class ParamGroupSettings:
    """The learning rate and other settings of each parameter group, which a scheduler may have changed."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def state(self) -> dict[str, Any]:
        """Return what JSON can hold: numbers, text and lists of them."""
        groups = []
        for group in self._groups():
            values = {key: value.tolist() if isinstance(value, Tensor) else value for key, value in group.items()}
            lists = {key: value if isinstance(value, (tuple, list)) else [value] for key, value in values.items()}
            kept = [key for key, some in lists.items() if all(isinstance(each, JSON_TYPES) for each in some)]
            groups.append({key: values[key] for key in kept if key not in ("params", "param_names")})
        return {"groups": groups}

    def restore(self, state: Mapping[str, Any]) -> None:
        for group, saved in zip(self._groups(), state["groups"], strict=True):
            for key, value in saved.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(value, list) else value

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]


class RngStates:
    """The states of torch's random number generators on all ranks, as base64 text."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: list[list[str]] = []

    def gather(self) -> None:
        states = [base64.b64encode(each.numpy().tobytes()).decode() for each in generator_states(self._device)]
        self._states = all_gather_json(states)

    def state(self) -> dict[str, Any]:
        return {"ranks": self._states}

    def restore(self, state: Mapping[str, Any]) -> None:
        ranks = state["ranks"]
        if len(ranks) != dist.get_world_size():
            if any(each != ranks[0] for each in ranks):
                log.warning("saved by %d ranks with different RNG states, loaded by %d: they are not restored",
                            len(ranks), dist.get_world_size())  # fmt: skip
                return
            ranks = [ranks[0]] * dist.get_world_size()
        states = [bytearray(base64.b64decode(each)) for each in ranks[dist.get_rank()]]
        cpu, *cuda = (torch.frombuffer(each, dtype=torch.uint8) for each in states)
        torch.set_rng_state(cpu)
        if cuda and DEVICE_TRAITS[self._device.type].has_own_generator:
            torch.cuda.set_rng_state(cuda[0], self._device)
