"""Forward and backward of a micro-batch as CUDA graphs, so that the host launches each with a single call.

A small model's kernels take less time than the host needs to launch them one by one. A graph holds the kernels with the
addresses of all their tensors, so it is only valid for batches of one shape and weights that stay where they are. Both
are checked before every step. What cannot be captured is computed as before.
"""

import gc
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trimaran.core import show_bytes
from trimaran.data import Inputs, StepBatch
from trimaran.parallel import GradientBuckets
from trimaran.train.loss.objective import LossSums

log = logging.getLogger(__name__)

EAGER_STEPS = 3  # of one shape before a capture: by then everything is compiled and libraries have chosen kernels
MAX_CHANGES = 4  # of shapes or addresses; if they change again and again, another capture does not pay

SPARE_BYTES = 2 << 30  # beyond what eager steps needed at most: a pool of its own may fragment in another way
KNOWN_PACKAGES = ("torch", "transformers", "trimaran")

Forward = Callable[[Inputs], tuple[LossSums, Tensor]]  # from a micro-batch to its losses and balance loss
Signature = tuple[tuple[object, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchGraphs:
    """The graphs of one micro-batch. They read `inputs` and `factor`, by which the loss is multiplied.

    `losses` holds the result after `forward`; the gradients hold theirs after `backward`.
    """

    inputs: Mapping[str, Tensor]
    factor: Tensor
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    losses: LossSums

    def fill(self, inputs: Inputs, factor: Tensor) -> None:
        torch._foreach_copy_([*self.inputs.values(), self.factor], [*(inputs[name] for name in self.inputs), factor])


class StepGraphs:
    """Captures forward and backward after some eager steps, and holds the graphs while they are valid.

    The first micro-batch of a step creates the gradients, the others add to them, so there are graphs for both. They
    share one memory pool with each other, but not with the rest of the process: what backward needs stays reserved.
    """

    def __init__(
        self, forward: Forward, module: nn.Module, *, grad_accum: int, buckets: GradientBuckets | None = None
    ) -> None:
        """With `buckets`, the gradients are slices of them."""
        self._forward, self._grad_accum, self._buckets = forward, grad_accum, buckets
        self._trained = [each for each in module.parameters() if each.requires_grad]
        self._held = (*module.parameters(), *module.buffers())
        self._signature: Signature = ()
        self._addresses: list[int] = []
        self._eager_steps, self._changes_left = 0, MAX_CHANGES
        self._micro_batches: list[MicroBatchGraphs] = []
        self._gradients: list[Tensor | None] = []  # of the trained parameters
        self._pool_bytes = 0

    @property
    def is_captured(self) -> bool:
        return bool(self._micro_batches)

    def micro_batches(self, batch: StepBatch) -> Sequence[MicroBatchGraphs]:
        """Return the graphs of each micro-batch of a step; empty if this step is computed without them.

        Call it before every step, while no parameter has a gradient.
        """
        signature = signature_of(batch)
        if signature != self._signature or (self.is_captured and self._addresses != self._current_addresses()):
            self._changes_left -= self.is_captured
            self.release()
            self._signature, self._eager_steps = signature, 0
        if not signature or not self._changes_left:
            return ()
        if not self.is_captured:
            self._eager_steps += 1
            if self._eager_steps > EAGER_STEPS:
                self._try_capture(batch)
        if not self.is_captured:
            return ()
        first, *others = self._micro_batches
        return [first, *others * (self._grad_accum - 1)]

    def assign_gradients(self) -> None:
        for parameter, gradient in zip(self._trained, self._gradients, strict=True):
            parameter.grad = gradient

    def make_room(self) -> None:
        """Release the graphs if other work that needs as much memory as a step would not fit beside them."""
        if self.is_captured and torch.cuda.mem_get_info()[0] < self._pool_bytes:
            self.release()

    def release(self) -> None:
        if not self.is_captured:
            return
        torch.cuda.synchronize()
        self._micro_batches, self._gradients, self._eager_steps = [], [], 0
        gc.unfreeze()  # the capture froze what exists, also what refers to the graphs
        _free_unused()

    def _try_capture(self, batch: StepBatch) -> None:
        _free_unused()  # the pool of the graphs cannot use what eager steps have cached
        before, stream = torch.cuda.memory_reserved(), torch.cuda.current_stream()
        try:
            # Raise unless a step surely fits into memory that is free now: running out of it during a capture is not
            # safe.
            needed = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
            free = torch.cuda.mem_get_info()[0]
            if free < needed + SPARE_BYTES:
                raise RuntimeError(f"a step needs {show_bytes(needed)}, and {show_bytes(free)} are free")
            self._capture(batch)
        except Exception as error:  # of any library: the model's own code may do what a capture does not allow
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own stream the current one
            log.info("steps are not captured as CUDA graphs: %s", str(error).splitlines()[0])
            self._changes_left, self._micro_batches, self._gradients = 0, [], []
            self._clear_gradients()
            torch.cuda.synchronize()
            _free_unused()
            return
        self._pool_bytes = torch.cuda.memory_reserved() - before
        self._addresses = self._current_addresses()
        gc.freeze()  # what exists now lives as long as the run: later full collections need not look at it again
        log.info("forward and backward are replayed as CUDA graphs from step %d on", batch.step + 1)

    def _capture(self, batch: StepBatch) -> None:
        drawn_before = host_random_states()
        inputs = {name: each.clone() for name, each in batch.micro(0).items()}
        factor = torch.zeros((), device=next(iter(inputs.values())).device)
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        if self._buckets is not None:
            self._buckets.assign()
        for _ in range(min(2, self._grad_accum)):
            forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            # Other threads pin memory and wait for events meanwhile, which the default mode forbids.
            options = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(forward, **options):
                losses, balance = self._forward(inputs)
                loss = (losses.total + balance) * factor
            with torch.cuda.graph(backward, **options):
                loss.backward()
            parts = None if losses.parts is None else losses.parts.detach()
            sums = LossSums(losses.total.detach(), parts)
            graphs = MicroBatchGraphs(inputs=inputs, factor=factor, forward=forward, backward=backward, losses=sums)
            self._micro_batches.append(graphs)
        if drawn_before != host_random_states():  # for example to leave out layers at random
            raise RuntimeError("the model draws random numbers on the host, which a replay would not repeat")
        self._gradients = [each.grad for each in self._trained]
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        for each in self._trained:
            each.grad = None

    def _current_addresses(self) -> list[int]:
        return [each.data_ptr() for each in self._held]


def has_known_code(module: nn.Module) -> bool:
    """Return whether all modules are of packages whose forward does the same at every step.

    A capture cannot see that other code depends on what changes from step to step, such as a counter.
    """
    return all(type(each).__module__.partition(".")[0] in KNOWN_PACKAGES for each in module.modules())


def host_random_states() -> tuple[object, ...]:
    return random.getstate(), bytes(torch.default_generator.get_state().numpy())


def signature_of(batch: StepBatch) -> Signature:
    """Return what must be equal for a graph to be valid; empty for a batch whose layout the host has to know."""
    if batch.host_arrays or batch.offsets:
        return ()
    return tuple((name, each.shape, each.dtype) for name, each in batch.arrays.items())


def _free_unused() -> None:
    """Return memory that nothing uses to the device, also that of cycles of Python objects."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # one that was created during a capture is in the pool of its graph
    torch.cuda.empty_cache()
