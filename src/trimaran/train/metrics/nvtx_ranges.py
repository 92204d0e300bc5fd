"""NVTX ranges of a rank: its steps, phases, layers and collectives, for Nsight Systems and other tools that read them.

A tool that is attached to the process receives them; without one a range costs the call. While they are off nothing is
installed. `docs/guides/nsight.md` says what each range means.
"""

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves  # private in torch

from trimaran.core import DEVICE_TRAITS, Phase, UserError
from trimaran.nets import Network
from trimaran.train.metrics.step_clock import NextPhase, PhaseListener, StepClock

# What `nn.Module.__call__` calls instead of the module's own code, which `Module.compile` sets. Around it a range is
# outside a compiled block; in a hook of the module it would be a graph break.
CALL = "_compiled_call_impl"
INNER = "_trimaran_inner"  # of our call: the one that it replaced; None for a block that is not compiled
# The operators of torch that every collective goes through: those of Python code, of DDP and FSDP, of functional
# operators and of compiled code.
NAMES = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "barrier": "barrier",
    "broadcast_": "broadcast",
    "gather_": "gather",
    "recv_": "recv",
    "reduce_": "reduce",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "scatter_": "scatter",
    "send": "send",
}
WORLD_DESCRIPTION = "default_pg"
MESH_PREFIX = "mesh_"  # torch's, before the name of a mesh dim


# The place of our kernels: the operators of every call pass it, on their way to that of their device. It has no other
# use for collectives.
KEY = torch._C.DispatchKey.BackendSelect
FIRST_PHASE = "data"  # of a step


class LayerRanges:
    """Ranges of blocks by module path. A tool needs the end of a range on the thread that began it.

    Autograd computes the gradients of CUDA tensors on a thread of its own. There the range of a block begins with the
    gradient of its output, and ends with the gradient of its input, with the next block, or with the backward. What a
    block recomputes is part of it.
    """

    def __init__(self, push: Callable[[str], Any], pop: Callable[[], Any]) -> None:
        self._push, self._pop = push, pop
        self._blocks: list[nn.Module] = []
        self._thread = threading.local()  # open: the block whose backward runs; task: the backward

    def install(self, networks: Sequence[Network]) -> None:
        """Put ranges around the blocks, in place. A compiled block is not compiled again."""
        for network in networks:
            names = {module: name for name, module in network.module.named_modules()}
            for block in network.blocks:
                setattr(block, CALL, self._ranged(block, names[block]))
                self._blocks.append(block)

    def remove(self) -> None:
        for block in self._blocks:
            inner = getattr(block.__dict__[CALL], INNER)
            if inner is None:
                del block.__dict__[CALL]
            else:
                setattr(block, CALL, inner)
        self._blocks.clear()

    def _ranged(self, block: nn.Module, name: str) -> Callable[..., Any]:
        inner = getattr(block, CALL)
        compute = inner or block._call_impl

        def call(*values: Any, **named: Any) -> Any:
            if torch.is_grad_enabled() and (entering := _trained(values, named.values())) is not None:
                entering.register_hook(lambda _: self._leave(name))
            self._push(f"forward {name}")
            try:
                output = compute(*values, **named)
            finally:
                self._pop()
            if torch.is_grad_enabled() and (leaving := _trained([output])) is not None:
                leaving.register_hook(lambda _: self._enter(name))
            return output

        setattr(call, INNER, inner)
        return call

    def _enter(self, name: str) -> None:
        task = torch._C._current_graph_task_id()
        if getattr(self._thread, "task", None) != task:
            self._thread.task = task
            # Not every block has a gradient of its input, such as the first one after a frozen embedding.
            torch.autograd.Variable._execution_engine.queue_callback(self._close)
        self._close()
        self._push(f"backward {name}")
        self._thread.open = name

    def _leave(self, name: str) -> None:
        """End the backward of a block, unless that of the next has begun: their hooks may be on the same tensor."""
        if getattr(self._thread, "open", None) == name:
            self._close()

    def _close(self) -> None:
        if getattr(self._thread, "open", None) is not None:
            self._thread.open = None
            self._pop()


def is_compiled(module: nn.Module) -> bool:
    """Return whether `Module.compile` has compiled the module, with ranges around it or without."""
    call = getattr(module, CALL, None)
    return getattr(call, INNER, call) is not None


def _trained(*values: Iterable[Any]) -> Tensor | None:
    leaves = (each for group in values for each in tree_leaves([*group]))
    return next((each for each in leaves if isinstance(each, Tensor) and each.requires_grad), None)


class CollectiveRanges:
    """Ranges such as `all_reduce dp_shard 4194304 B` over the call. Tools link the collective on a GPU to it."""

    def __init__(self, push: Callable[[str], Any], pop: Callable[[], Any]) -> None:
        self._push, self._pop = push, pop
        self._below = torch._C._dispatch_keyset_full_after(KEY)
        self._library: Any = None

    def install(self) -> None:
        """Let every collective of this process pass our kernels, which call it in a range."""
        self._library = torch.library.Library("c10d", "IMPL")
        for operator, name in NAMES.items():
            self._library.impl(operator, self._ranged(operator, name), KEY.name, with_keyset=True)

    def remove(self) -> None:
        self._library._destroy()
        self._library = None

    def _ranged(self, operator: str, name: str) -> Callable[..., Any]:
        collective = getattr(torch.ops.c10d, operator).default

        def call(keys: Any, *values: Any) -> Any:
            self._push(f"{name} {_group_of(values)} {max((_tensor_bytes(each) for each in values), default=0)} B")
            try:
                # It releases the GIL: gloo's threads need it to free tensors, while they hold a lock of new calls.
                return collective.redispatch(keys & self._below, *values)
            finally:
                self._pop()

        return call


def _group_of(values: tuple[Any, ...]) -> str:
    """Return the axis of the collective's group; `world` for all ranks."""
    # It comes before the reduction, if there is one.
    group = dist.ProcessGroup.unbox(next(each for each in values if isinstance(each, torch.ScriptObject)))
    text = group.group_desc
    if text == WORLD_DESCRIPTION:
        return "world"
    return text.removeprefix(MESH_PREFIX) if text.startswith(MESH_PREFIX) else f"group-{group.group_name}"


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_tensor_bytes, value)) if isinstance(value, list | tuple) else 0


class StepRanges(PhaseListener):
    """The ranges of this rank. On the thread that trains: a step, in it one phase at a time, in that the rest."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._push: Callable[[str], Any] = torch.cuda.nvtx.range_push
        self._pop: Callable[[], Any] = torch.cuda.nvtx.range_pop
        if not hasattr(torch._C, "_nvtx"):
            try:
                nvtx: Any = importlib.import_module("nvtx")
            except ModuleNotFoundError:
                raise UserError("D017.nvtx-ranges-need", where="telemetry.nvtx") from None
            self._push, self._pop = nvtx.push_range, nvtx.pop_range
        self._layers = LayerRanges(self._push, self._pop)
        self._collectives = CollectiveRanges(self._push, self._pop)
        self._listening = contextlib.ExitStack()
        self._networks: tuple[Network, ...] = ()
        self._phase = ""  # the open one; empty while nothing is installed

    def follow(self, networks: Sequence[Network]) -> None:
        self._networks = tuple(networks)
        if self._phase:
            self._layers.remove()
            self._layers.install(self._networks)

    def install(self, step: int) -> None:
        """Begin with this step, which is about to start."""
        self._layers.install(self._networks)
        self._collectives.install()
        self._listening.callback(self._clock.listen(self))
        self._open(step)

    def remove(self) -> None:
        """Close all ranges, between two steps, and remove what `install` installed. Without it, do nothing."""
        if not self._phase:
            return
        self._close()
        self._listening.close()
        self._collectives.remove()
        self._layers.remove()

    def begin_step(self, step: int) -> None:
        if self._phase:
            self._close()
            self._open(step)

    def enter(self, phase: NextPhase) -> None:
        if phase != self._phase:
            self._pop()
            self._push(phase)
            self._phase = phase

    def begin_span(self, phase: Phase, axis: str, stage: int | None) -> None:
        self._push(f"{phase} {axis if stage is None else stage}")

    def end_span(self, phase: Phase | None) -> None:
        self._pop()

    def _open(self, step: int) -> None:
        self._push(f"step {step}")
        self._push(FIRST_PHASE)
        self._phase = FIRST_PHASE

    def _close(self) -> None:
        self._pop()
        self._pop()
        self._phase = ""

    @staticmethod
    def start_capture(device: torch.device) -> None:
        """Have a tool that waits for it record from now on: `cudaProfilerStart`. Without a GPU it always records."""
        if DEVICE_TRAITS[device.type].runs_async:
            torch.cuda.synchronize(device)  # kernels of the step before are not part of the recording
            torch.cuda.profiler.start()

    @staticmethod
    def stop_capture(device: torch.device) -> None:
        """End what `start_capture` began, after the kernels of the last step."""
        if DEVICE_TRAITS[device.type].runs_async:
            with contextlib.suppress(RuntimeError):  # the tool may have stopped by itself
                torch.cuda.synchronize(device)
                torch.cuda.profiler.stop()
