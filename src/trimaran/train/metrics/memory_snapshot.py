"""Where a rank's memory is: a JSON file on demand, and one when memory runs out."""

import contextlib
import gc
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimaran.run import RunDirectory
from trimaran.run.profile_request import snapshot_file
from trimaran.telemetry.memory_holders import Owner, by_kind, by_module, read_snapshot

log = logging.getLogger(__name__)

ENTRIES = 200_000  # of the allocator's history, about 200 bytes each


class Photographer:
    """Tells what holds memory on this rank. `history`: the allocator remembers who asked for what, all the time."""

    def __init__(self, modules: Sequence[nn.Module], device: torch.device, *, history: bool = False) -> None:
        self.device, self._modules, self._history = device, tuple(modules), history
        self._film: Film | None = None
        if history and device.type == "cuda":
            _remember(True)

    def begin(self) -> None:
        """Look on from now, for what lives only within a step: gradients, activations, and on CUDA everything."""
        if self.device.type == "cuda" and not self._history:
            _remember(True)
        self._film = Film(self._modules)

    def end(self, path: Path, *, step: int) -> None:
        """Write down what was seen since `begin`."""
        film, self._film = self._film, None
        assert film is not None
        film.close()
        try:
            self.write(path, step=step, within=film)
        finally:
            if self.device.type == "cuda" and not self._history:
                _remember(False)

    def write(self, path: Path, *, step: int, within: "Film | None" = None, **why: Any) -> None:
        """Write who holds this rank's memory now."""
        tree = self.look(within) | {"step": step, "time": time.time(), "host": platform.node(), "pid": os.getpid()}
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}")
        draft.write_text(json.dumps(tree | why, indent=1), encoding="utf-8")
        draft.replace(path)

    def look(self, within: "Film | None" = None) -> dict[str, Any]:
        """Return who holds this rank's memory: now, and `within` a step that a film was made of."""
        owners = [*{each.address: each for each in owned(self._modules, self.device)}.values()]
        found: dict[str, Any] = {"device": str(self.device), "history": self._history or within is not None}
        if self.device.type == "cuda":
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            found |= {"total": torch.cuda.get_device_properties(index).total_memory}
            found |= read_snapshot(torch.cuda.memory._snapshot(index), owners, device=index)
        else:
            resident = psutil.Process().memory_info().rss
            known = sum(each.num_bytes for each in owners)
            found |= {"total": psutil.virtual_memory().total, "allocated": resident, "unknown": resident - known,
                      "holders": by_module(owners), "lines": [], "timeline": [], "peak": None}  # fmt: skip
        found["kinds"] = by_kind(owners)
        if within is not None:
            found["within"] = {"kinds": by_kind(within.owners), "holders": by_module(within.owners)}
        return found


class Film:
    """What lives within a step only, as far as it can be seen: gradients before an update, and what modules hand on.

    Of activations that is what is still held when the forward pass ends: outputs of modules that backward needs. What
    an operation inside of a module keeps is not seen, nor is anything inside of a compiled one.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._names = {parameter: name for each in modules for name, parameter in each.named_parameters()}
        self._outputs: dict[int, tuple[StorageWeakRef, Owner]] = {}
        self._activations: list[Owner] = []
        self._gradients: list[Owner] = []
        self._removers: list[Callable[[], None]] = [register_optimizer_step_pre_hook(self._before_update).remove]
        for root in modules:
            for name, module in visible(root):
                self._removers.append(module.register_forward_hook(self._hook_of(name)).remove)
            if not _is_compiled(root):
                self._removers.append(root.register_forward_hook(self._after_forward).remove)

    @property
    def owners(self) -> list[Owner]:
        return [*self._gradients, *self._activations]

    def close(self) -> None:
        for remove in self._removers:
            remove()
        self._outputs.clear()

    def _hook_of(self, name: str) -> Callable[..., None]:
        group = group_of(f"{name}.output")

        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            for each in output if isinstance(output, tuple | list) else (output,):
                if isinstance(each, Tensor) and each.requires_grad:
                    for owner in _owner(each, "activations", group, whole=True):
                        if owner.address not in self._outputs or self._outputs[owner.address][0].expired():
                            self._outputs[owner.address] = StorageWeakRef(_local(each).untyped_storage()), owner

        return note

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._outputs = {key: each for key, each in self._outputs.items() if not each[0].expired()}
        held = [owner for _, owner in self._outputs.values()]
        if sum(each.num_bytes for each in held) > sum(each.num_bytes for each in self._activations):
            self._activations = held

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        found = [
            owner
            for parameter, name in self._names.items()
            if parameter.grad is not None
            for owner in _owner(parameter.grad, "gradients", group_of(name))
        ]
        if sum(each.num_bytes for each in found) >= sum(each.num_bytes for each in self._gradients):
            self._gradients = found


def visible(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules under `root` that can be looked at without compiling anything anew."""
    hidden: list[str] = []
    for name, module in root.named_modules():
        if "" in hidden or any(name.startswith(f"{each}.") for each in hidden):
            continue
        if _is_compiled(module):
            hidden.append(name)
        elif name:
            yield name, module


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def owned(modules: Sequence[nn.Module], device: torch.device) -> Iterator[Owner]:
    """Yield what is known to hold memory of `device` now: parameters, buffers, gradients and the optimizers' states."""
    names: dict[Tensor, str] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            names[parameter] = name
            yield from _on(device, parameter, "parameters", group_of(name))
            if parameter.grad is not None:
                yield from _on(device, parameter.grad, "gradients", group_of(name))
        for name, buffer in module.named_buffers():
            yield from _on(device, buffer, "buffers", group_of(name))
    for optimizer in (each for each in gc.get_objects() if issubclass(type(each), Optimizer)):
        for parameter, state in optimizer.state.items():
            name = names.get(parameter, "")
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, Tensor):
                    yield from _on(device, value, "states", group_of(name))


def group_of(name: str) -> str:
    """Return the part of a network that a parameter belongs to: its layer, or the module that has it."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1]) or name


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of a device or of the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def photograph_oom(photographer: Photographer, run: RunDirectory, *, rank: int, step: Callable[[], int]) -> None:
    """Have a snapshot written whenever the device's memory runs out, while everything is still in its place.

    Nothing that goes wrong with it is allowed to hide that memory ran out.
    """
    if photographer.device.type != "cuda":
        return

    def observe(device: int, wanted: int, total: int, free: int) -> None:
        with contextlib.suppress(Exception):
            path = snapshot_file(run, step=step(), rank=rank)
            photographer.write(path, step=step(), oom={"wanted": wanted, "total": total, "free": free})

    core: Any = torch._C
    core._cuda_attach_out_of_memory_observer(observe)


def _remember(on: bool) -> None:
    """Have the allocator remember from now on who asks for what, or no more."""
    record: Any = torch.cuda.memory._record_memory_history
    record(enabled="all" if on else None, context="all", stacks="python", max_entries=ENTRIES)


def _on(device: torch.device, tensor: Tensor, kind: str, module: str) -> Iterator[Owner]:
    return (each for each in _owner(tensor, kind, module) if _local(tensor).device.type == device.type)


def _owner(tensor: Tensor, kind: str, module: str, *, whole: bool = False) -> Iterator[Owner]:
    """Yield the owner of a tensor's memory; nothing where there is none, such as between two gathers.

    Several gradients may lie in one storage. Whoever keeps an output keeps all of it: `whole`.
    """
    local = _local(tensor)
    storage = local.untyped_storage()
    try:
        address, size = (storage if whole else local).data_ptr(), storage.nbytes()
    except RuntimeError:  # a tensor without memory of its own
        return
    if address and size:
        yield Owner(address=address, num_bytes=size if whole else min(size, local.nbytes), kind=kind, module=module)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
