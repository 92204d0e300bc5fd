"""Memory snapshots of a rank: a JSON file of what holds its memory, on request and on an out-of-memory error."""

import contextlib
import gc
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimaran.core import DEVICE_TRAITS, write_atomically
from trimaran.nets import is_dtensor
from trimaran.runs import MemoryOwner, RunDirectory, by_kind, by_module, read_snapshot, snapshot_file
from trimaran.train.metrics.group_norms import module_of
from trimaran.train.metrics.nvtx_ranges import is_compiled

log = logging.getLogger(__name__)

MAX_HISTORY_ENTRIES = 200_000  # in the allocator's history, about 200 bytes each


class MemorySnapshotter:
    """Reports what holds memory, by `modules`. `history`: the CUDA allocator always records allocations."""

    def __init__(
        self, modules: Callable[[], Sequence[nn.Module]], device: torch.device, *, history: bool = False
    ) -> None:
        self.device, self._modules, self._history = device, modules, history
        self.has_allocator = DEVICE_TRAITS[device.type].has_own_memory  # which records what it allocates
        self._tracker: StepMemoryTracker | None = None
        if history and self.has_allocator:
            _record_allocation_history(True)

    def begin(self) -> None:
        """Track memory that lives only within a step: gradients, activations and, on CUDA, all allocations."""
        if self.has_allocator and not self._history:
            _record_allocation_history(True)
        self._tracker = StepMemoryTracker(self._modules())

    def end(self, path: Path, *, step: int) -> None:
        tracker, self._tracker = self._tracker, None
        assert tracker is not None
        tracker.close()
        try:
            self.write(path, step=step, within=tracker)
        finally:
            if self.has_allocator and not self._history:
                _record_allocation_history(False)

    def write(self, path: Path, *, step: int, within: "StepMemoryTracker | None" = None, **why: Any) -> None:
        tree = self.describe(within) | {"step": step, "time": time.time(), "host": platform.node(), "pid": os.getpid()}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(tree | why, indent=1))

    def describe(self, within: "StepMemoryTracker | None" = None) -> dict[str, Any]:
        """Return what holds this rank's memory: now and, with a tracker, `within` the tracked step."""
        owners = [*{each.address: each for each in find_owners(self._modules(), self.device)}.values()]
        tree: dict[str, Any] = {"device": str(self.device), "history": self._history or within is not None}
        if self.has_allocator:
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            tree |= {"total": torch.cuda.get_device_properties(index).total_memory}
            tree |= read_snapshot(torch.cuda.memory._snapshot(index), owners, device=index)
        else:
            resident = psutil.Process().memory_info().rss
            known = sum(each.num_bytes for each in owners)
            tree |= {"total": psutil.virtual_memory().total, "allocated": resident, "unknown": resident - known,
                     "holders": by_module(owners), "lines": [], "timeline": [], "peak": None}  # fmt: skip
        tree["kinds"] = by_kind(owners)
        if within is not None:
            tree["within"] = {"kinds": by_kind(within.owners), "holders": by_module(within.owners)}
        return tree


class StepMemoryTracker:
    """Tracks memory that lives only within a step: gradients before an update, and the outputs of modules.

    Activations are the outputs that are still held when the forward ends, because backward needs them. Tensors that
    operations save inside a module are not tracked, nor is anything inside a compiled module.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._names = {parameter: name for each in modules for name, parameter in each.named_parameters()}
        self._outputs: dict[int, tuple[StorageWeakRef, MemoryOwner]] = {}
        self._activations: list[MemoryOwner] = []
        self._gradients: list[MemoryOwner] = []
        self._hook_removers: list[Callable[[], None]] = [register_optimizer_step_pre_hook(self._before_update).remove]
        for root in modules:
            compiled: list[str] = []  # a hook on a module inside of one would cause a recompilation
            for name, module in root.named_modules():
                if "" in compiled or any(name.startswith(f"{each}.") for each in compiled):
                    continue
                if is_compiled(module):
                    compiled.append(name)
                elif name:
                    note = partial(self._note_output, module_of(f"{name}.output"))
                    self._hook_removers.append(module.register_forward_hook(note).remove)
            if not is_compiled(root):
                self._hook_removers.append(root.register_forward_hook(self._after_forward).remove)

    @property
    def owners(self) -> list[MemoryOwner]:
        return [*self._gradients, *self._activations]

    def close(self) -> None:
        for remove in self._hook_removers:
            remove()
        self._outputs.clear()

    def _note_output(self, group: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for each in output if isinstance(output, tuple | list) else (output,):
            if isinstance(each, Tensor) and each.requires_grad:
                for owner in _owner(each, "activations", group, whole=True):
                    if owner.address not in self._outputs or self._outputs[owner.address][0].expired():
                        self._outputs[owner.address] = StorageWeakRef(_local(each).untyped_storage()), owner

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._outputs = {key: each for key, each in self._outputs.items() if not each[0].expired()}
        held = [owner for _, owner in self._outputs.values()]
        if sum(each.num_bytes for each in held) > sum(each.num_bytes for each in self._activations):
            self._activations = held

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        gradients = [
            owner
            for parameter, name in self._names.items()
            if parameter.grad is not None
            for owner in _owner(parameter.grad, "gradients", module_of(name))
        ]
        if sum(each.num_bytes for each in gradients) >= sum(each.num_bytes for each in self._gradients):
            self._gradients = gradients


def find_owners(modules: Sequence[nn.Module], device: torch.device) -> Iterator[MemoryOwner]:
    """Yield the known owners of memory on `device`: parameters, buffers, gradients and optimizer states."""
    names: dict[Tensor, str] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            names[parameter] = name
            yield from _owner_on_device(device, parameter, "parameters", module_of(name))
            if parameter.grad is not None:
                yield from _owner_on_device(device, parameter.grad, "gradients", module_of(name))
        for name, buffer in module.named_buffers():
            yield from _owner_on_device(device, buffer, "buffers", module_of(name))
    for optimizer in (each for each in gc.get_objects() if issubclass(type(each), Optimizer)):
        for parameter, state in optimizer.state.items():
            name = names.get(parameter, "")
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, Tensor):
                    yield from _owner_on_device(device, value, "states", module_of(name))


def snapshot_on_oom(snapshotter: MemorySnapshotter, run: RunDirectory, *, rank: int, step: Callable[[], int]) -> None:
    """Write a snapshot on a CUDA out-of-memory error, before anything is freed; its own errors are suppressed."""

    def observe(device: int, wanted: int, total: int, free: int) -> None:
        with contextlib.suppress(Exception):
            path = snapshot_file(run, step=step(), rank=rank)
            snapshotter.write(path, step=step(), oom={"wanted": wanted, "total": total, "free": free})

    core: Any = torch._C
    core._cuda_attach_out_of_memory_observer(observe)


def _record_allocation_history(on: bool) -> None:
    record: Any = torch.cuda.memory._record_memory_history
    record(enabled="all" if on else None, context="all", stacks="python", max_entries=MAX_HISTORY_ENTRIES)


def _owner_on_device(device: torch.device, tensor: Tensor, kind: str, module: str) -> Iterator[MemoryOwner]:
    return (each for each in _owner(tensor, kind, module) if _local(tensor).device.type == device.type)


def _owner(tensor: Tensor, kind: str, module: str, *, whole: bool = False) -> Iterator[MemoryOwner]:
    """Yield the owner of a tensor's memory; nothing if the tensor has none, as a freed FSDP parameter.

    With `whole`, the owner holds the complete storage, as for a saved output. Otherwise only the tensor's own bytes,
    because several gradients may share a storage.
    """
    local = _local(tensor)
    storage = local.untyped_storage()
    try:
        address, size = (storage if whole else local).data_ptr(), storage.nbytes()
    except RuntimeError:  # a tensor without storage
        return
    if address and size:
        num_bytes = size if whole else min(size, local.nbytes)
        yield MemoryOwner(address=address, num_bytes=num_bytes, kind=kind, module=module)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if is_dtensor(tensor) else tensor
