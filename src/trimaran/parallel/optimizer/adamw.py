"""AdamW with moments in fp32, bf16 or 8 bits, on device, host or disk, and weights in fp32 or two 16-bit halves."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimaran.nets import is_dtensor, local_part
from trimaran.parallel.disk_store import ALIGNMENT, DiskStore, padded
from trimaran.parallel.optimizer.batched_update import BatchedUpdate
from trimaran.parallel.optimizer.build_optimizer import SplitWeightsOptimizer
from trimaran.parallel.optimizer.moments import (
    FORMATS,
    AdamWConstants,
    IndexRuns,
    MomentFormat,
    StateChunk,
    States,
    hash_text,
    index_runs,
    step_constants,
    update_chunk,
)
from trimaran.parallel.optimizer.split_weights import NO_SPLIT_WEIGHTS, SplitWeights
from trimaran.parallel.optimizer.state_streaming import DiskStream, StateStream
from trimaran.parallel.tensor_shards import goes_to_disk, release_pages, store_of
from trimaran.parallel.tensor_sums import has_kernels

MIN_8BIT_VALUES = 4096  # a parameter with fewer values keeps fp32 moments
CHUNK_VALUES = 2**23  # values that are updated at once: bounds the temporary memory of a step
CHUNK_ROW_MULTIPLE = 16  # so that every chunk starts at an address that is aligned for vectors of any dtype
NOT_MOMENTS = ("step", "low")


class LowMemoryAdamW(SplitWeightsOptimizer):
    """AdamW with its moments in one of three formats: on the parameters' device, on the host, or on a disk.

    Takes groups of named parameters, and updates this rank's shard of each, whatever mesh it is on. States are plain
    tensors in the shape of the shard, and exist from the start. A parameter in `split_weights` is bf16 and the upper
    half of an fp32 weight (see `split_weights`); its lower half is updated with it. With a folder `disk` large
    states are in a file there. Parameters and lower halves may be on disk, too.

    Before a step, `factor` may be set to what the gradients are multiplied by, and `found_inf` (as in torch's AdamW) to
    1 to skip the update: each a tensor of one element on the weights' device. On a GPU the host reads neither, and
    waits for nothing.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        defaults: dict[str, Any],
        states: str,
        seed: int,
        on_host: bool,
        split: SplitWeights = NO_SPLIT_WEIGHTS,
        disk: Path | None = None,
        chunk_values: int = CHUNK_VALUES,
    ) -> None:
        super().__init__(groups, defaults)
        self._chunk_values = chunk_values
        self.split_weights = split
        self.found_inf = self.factor = None
        self._formats: dict[Tensor, MomentFormat] = {}
        self._index_runs: dict[tuple[Tensor, int, int], IndexRuns] = {}  # a cache: they are the same at every step
        sizes = [len(group["params"]) for group in self.param_groups]
        parameters = [each for group in self.param_groups for each in group["params"]]
        device, names = parameters[0].device, [name for group in self.param_groups for name in group["param_names"]]
        steps, hashes = torch.zeros(len(names), device=device), [hash_text(f"{seed}/{name}") for name in names]
        for each in parameters:  # the size of the full parameter decides, not that of its shard
            is_large = each.ndim >= 2 and each.numel() >= MIN_8BIT_VALUES
            self._formats[each] = FORMATS["fp32" if states == "8bit" and not is_large else states]
        store = None
        if disk is not None:
            layouts = [moments.layout(tuple(local_part(each).shape)) for each, moments in self._formats.items()]
            num_bytes = [math.prod(shape) * dtype.itemsize for layout in layouts for shape, dtype in layout.values()]
            store = DiskStore(disk, sum(padded(size) for size in num_bytes if goes_to_disk(size)))
        release_pages()  # of weights on disk, which have just been filled
        for parameter, step in zip(parameters, steps, strict=True):
            low = {"low": split.lower_halves[parameter]} if parameter in split.lower_halves else {}
            zeros = _zeros(self._formats[parameter], local_part(parameter), on_host, store)
            self.state[parameter] = {"step": step} | zeros | low
        # For each group, step counts and name hashes of its parameters.
        on_device = torch.tensor(hashes).int().to(device)
        self._counts = list(zip(steps.split(sizes), on_device.split(sizes), strict=True))
        self._state_stream: StateStream | DiskStream | None = StateStream(device) if on_host else None
        self._state_stream = DiskStream(device) if disk else self._state_stream
        self._weights_on_disk = any(store_of(local_part(each)) is not None for each in parameters)
        self._batched, self._kernel = None, None
        if has_kernels(device.type):
            from trimaran.parallel.optimizer.kernels.adamw import update_chunk_on_gpu  # noqa: PLC0415  needs Triton

            self._kernel = update_chunk_on_gpu
            if self._state_stream is None:
                self._batched = BatchedUpdate(parameters, self.state, steps, hashes, sizes)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyrefly: ignore[bad-override]
        """Update the weights that have a gradient, unless `found_inf` is set."""
        assert closure is None, "closures are not supported"
        if self._batched is not None:
            self._batched.run(self.param_groups, self.factor, self.found_inf)
            return
        if self._kernel is None and self.found_inf is not None and bool(self.found_inf):
            return
        chunks, copies = [], []
        for number, group in enumerate(self.param_groups):
            constants = AdamWConstants(**{key: group[key] for key in ("lr", "betas", "eps", "weight_decay")})
            for parameter, its_constants in self._count_step(number, constants):
                weight, low = local_part(parameter), self.state[parameter].get("low")
                tables = [_as_table(weight), None if low is None else _as_table(low)]
                pairs = ((each, table) for each, table in zip((weight, low), tables, strict=True) if table is not None)
                copies += [(each, table) for each, table in pairs if each.data_ptr() != table.data_ptr()]
                chunks += self._chunks(parameter, tables, its_constants, constants)
        on_host = [chunk.states for chunk in chunks]
        on_device = iter(on_host) if self._state_stream is None else self._state_stream.stream(on_host)
        for chunk, states in zip(chunks, on_device, strict=True):
            if "weight" in states or "low" in states:  # they were read from disk, like the moments
                chunk = replace(chunk, weight=states.get("weight", chunk.weight), low=states.get("low", chunk.low))
                states = {key: value for key, value in states.items() if key not in ("weight", "low")}
            if self._kernel is None:
                update_chunk(chunk, states, self._formats[chunk.parameter])
            else:
                self._kernel(chunk, states, self.found_inf)
        for tensor, table in copies:  # of tensors that are not contiguous
            tensor.copy_(table.view(tensor.shape))
        if self._weights_on_disk:
            self.wait()  # the next forward reads them

    def wait(self) -> None:
        """Wait until states on the host or on disk have been copied back from the device."""
        if self._state_stream is not None:
            self._state_stream.wait()

    def state_dict(self) -> dict[str, Any]:
        """Return states and groups as torch's optimizers do. The states are not copies."""
        self.wait()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the values of a state dict of the same parameters and formats, without torch's casts and moves."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})
        for number, states in enumerate(self.state.values()):
            saved = state_dict["state"][number]
            if saved.keys() != states.keys() or any(saved[key].dtype != states[key].dtype for key in states):
                raise ValueError("the saved optimizer states have another format")
            for key, value in states.items():
                value.copy_(saved[key])

    def _count_step(self, number: int, constants: AdamWConstants) -> Iterator[tuple[Tensor, Tensor]]:
        """Count a step of the group's parameters that have a gradient; yield each with its `step_constants`."""
        parameters, (steps, hashes) = self.param_groups[number]["params"], self._counts[number]
        used = [index for index, each in enumerate(parameters) if each.grad is not None]
        if not used:
            return
        # A skipped step does not count. Without a kernel, `step` has returned already.
        one = 1.0 if self.found_inf is None or self._kernel is None else 1.0 - self.found_inf.reshape(())
        # Not `_foreach_add_`, which reads a number on the device back to the host.
        for counted in [steps] if len(used) == len(parameters) else [steps[index] for index in used]:
            counted.add_(one)
        table = step_constants(steps, hashes, constants)
        yield from ((parameters[index], table[index]) for index in used)

    def _chunks(
        self, parameter: Tensor, tables: list[Tensor | None], its_constants: Tensor, constants: AdamWConstants
    ) -> Iterator[StateChunk]:
        (weight, low), gradient, states = tables, parameter.grad, self.state[parameter]
        assert gradient is not None
        assert weight is not None
        if is_dtensor(gradient) and is_dtensor(parameter):
            assert gradient.placements == parameter.placements, "a gradient is sharded as its parameter is"
        gradient = _as_table(local_part(gradient))
        streamed = {key: _as_table(value) for key, value in states.items() if key not in NOT_MOMENTS}
        others = {"weight": weight, "low": low}
        streamed |= {key: each for key, each in others.items() if each is not None and store_of(each) is not None}
        # Rows of a table on disk begin and end with a block of its file.
        widths = [each.shape[1] * each.element_size() for each in streamed.values() if store_of(each) is not None]
        multiple = max(CHUNK_ROW_MULTIPLE, *(ALIGNMENT // math.gcd(ALIGNMENT, each) for each in widths), 1)
        height = max(multiple, self._chunk_values // max(1, weight.shape[1]) // multiple * multiple)
        for start in range(0, len(weight) if weight.numel() else 0, max(1, height)):
            rows, runs = slice(start, min(start + height, len(weight))), None
            if states["exp_avg"].dtype == torch.bfloat16:  # its moments are rounded stochastically
                key = (parameter, rows.start, rows.stop)
                runs = self._index_runs.get(key) or self._index_runs.setdefault(key, index_runs(parameter, rows))
            yield StateChunk(
                weight=weight[rows],
                low=None if low is None else low[rows],
                gradient=gradient[rows],
                states={key: value[rows] for key, value in streamed.items()},
                factor=self.factor,
                step=states["step"],
                step_constants=its_constants,
                constants=constants,
                parameter=parameter,
                index_runs=runs,
            )


def _zeros(moments: MomentFormat, shard: Tensor, on_host: bool, store: DiskStore | None = None) -> States:
    """Return a parameter's initial states: large ones on disk if there is a store; on a GPU's host they are pinned."""
    device = torch.device("cpu") if on_host else shard.device
    pinned = on_host and not shard.is_cpu
    return {
        key: store.allocate(shape, dtype)
        if store is not None and goes_to_disk(math.prod(shape) * dtype.itemsize)
        else torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)
        for key, (shape, dtype) in moments.layout(tuple(shard.shape)).items()
    }


def _as_table(tensor: Tensor) -> Tensor:
    """Return the tensor as 2-D, with its last dimension as columns: a view, or a copy if it is not contiguous."""
    width = tensor.shape[-1] if tensor.ndim else 1
    return tensor.contiguous().view(tensor.numel() // max(1, width), width)
