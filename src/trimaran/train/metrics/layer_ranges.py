"""Ranges around the forward and backward of each block, on the thread that computes it."""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves  # private in torch

from trimaran.nets import Network

# What `nn.Module.__call__` calls instead of the module's own code, which `Module.compile` sets. Around it a range is
# outside a compiled block; in a hook of the module it would be a graph break.
CALL = "_compiled_call_impl"
INNER = "_trimaran_inner"  # of our call: the one that it replaced; None for a block that is not compiled


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
        """Begin the backward of a block on this thread."""
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
    """Return the first tensor that needs a gradient; None without one."""
    leaves = (each for group in values for each in tree_leaves([*group]))
    return next((each for each in leaves if isinstance(each, Tensor) and each.requires_grad), None)
