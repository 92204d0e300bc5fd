"""AdamW's update of all parameters on a GPU, with one launch for each kind of parameter."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimaran.nets import is_dtensor, local_part
from trimaran.parallel.optimizer.moments import States, index_runs
from trimaran.parallel.optimizer.optimizer_state import BLOCK, codebook, lower_bounds, num_blocks
from trimaran.parallel.tensor_sums import ALIGNED_BYTES, DeviceNumbers, ProgramMap, addresses_of, is_aligned, to_device

GradientKind = tuple[torch.dtype, bool]  # and whether its address is aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchKind:
    """What parameters of one launch have in common."""

    weight: torch.dtype
    gradient: torch.dtype
    moments: torch.dtype
    has_low: bool
    has_runs: bool
    aligned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatedTensors:
    """The contiguous tensors of one parameter that a kernel updates, and the element indices for the noise."""

    weight: Tensor
    low: Tensor | None
    states: States
    starts: Tensor | None
    run_length: int

    @property
    def width(self) -> int:
        return self.weight.shape[-1] if self.weight.ndim else 1

    @property
    def in_blocks(self) -> bool:
        return "exp_avg_scale" in self.states

    def addresses(self) -> list[int]:
        """Return the addresses in the order of the table's columns; 0 for what does not exist."""
        keys = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
        tensors = [self.weight, self.low, *(self.states.get(key) for key in keys)]
        return [0 if each is None else each.data_ptr() for each in tensors]

    def kind(self, gradient: GradientKind) -> LaunchKind:
        dtype, gradient_is_aligned = gradient
        aligned = all(is_aligned(each, self.weight.numel()) for each in self.addresses())
        has_part_blocks = self.in_blocks and self.width % BLOCK != 0
        return LaunchKind(
            weight=self.weight.dtype,
            gradient=dtype,
            moments=self.states["exp_avg"].dtype,
            has_low=self.low is not None,
            has_runs=self.starts is not None and len(self.starts) > 1,
            aligned=aligned and gradient_is_aligned and not has_part_blocks,
        )


class BatchedUpdate:
    """Updates weights and states of `parameters` in place, each by the numbers of its group.

    Tables on the device have the addresses of all tensors. Those of weights and states are compared with the last
    step's, and the tables are built again if one has moved. Addresses of gradients are copied to the device when one
    has changed. Nothing waits for the device.
    """

    def __init__(
        self, parameters: Sequence[Tensor], states: Mapping[Any, States], steps: Tensor, name_hashes: Sequence[int],
        group_sizes: Sequence[int],
    ) -> None:  # fmt: skip
        self._parameters, self._states, self._steps, self._name_hashes = parameters, states, steps, name_hashes
        self._group_of = [number for number, size in enumerate(group_sizes) for _ in range(size)]
        device = steps.device
        self._gradients, self._groups = DeviceNumbers(device), DeviceNumbers(device, torch.float64)
        self._betas = DeviceNumbers(device, torch.float64)
        self._addresses: list[int] = []
        self._gradient_kinds: list[GradientKind] = []
        self._tensors: list[UpdatedTensors] = []
        self._copies: list[tuple[Tensor, Tensor]] = []  # tensors that are not contiguous, and what is updated instead
        self._table, self._launches = torch.empty(0), list[Callable[..., None]]()

    def run(self, groups: Sequence[Mapping[str, Any]], factor: Tensor | None, refused: Tensor | None) -> None:
        """Update the parameters that have a gradient, unless `refused` is not zero; such a step does not count."""
        gradients = [_contiguous_gradient(each) for each in self._parameters]
        self._prepare(gradients)
        # 0 means that there is no gradient; that of an empty shard has no address of its own, and counts a step too.
        addresses = [0 if each is None else each.data_ptr() or 1 for each in gradients]
        on_device = self._gradients.set(addresses)
        all_used = 0 not in addresses
        one = 1.0 if refused is None else 1.0 - refused.reshape(())
        self._steps.add_(one if all_used else (on_device != 0) * one)
        betas = [group["betas"] for group in groups]
        each_beta = [betas[group][index] for index in (0, 1) for group in self._group_of]
        corrections = 1 - self._betas.set(each_beta).view(2, -1) ** self._steps.double()
        rows: list[float] = []  # of the table of groups, see `kernels.adamw`
        for group in groups:
            lr, (beta1, beta2) = float(group["lr"]), group["betas"]
            rows += [lr, 1 - lr * group["weight_decay"], beta2, 1 - beta1, 1 - beta2, group["eps"]]
        numbers = self._groups.set(rows)
        for tensor, copy in self._copies:
            copy.copy_(tensor)
        for launch in self._launches:
            launch(on_device, numbers, corrections, factor, refused)
        for tensor, copy in self._copies:
            tensor.copy_(copy)

    def _prepare(self, gradients: Sequence[Tensor | None]) -> None:
        """Build tables and launches again if a tensor has moved, or a gradient has another dtype or alignment."""
        states = self._states
        tensors = [tensor for each in self._parameters for tensor in (each, *states[each].values())]
        addresses = addresses_of(tensors)
        moved = addresses != self._addresses
        known = self._gradient_kinds or [(each.dtype, True) for each in self._parameters]
        kinds = [
            kind if each is None else (each.dtype, each.data_ptr() % ALIGNED_BYTES == 0)
            for each, kind in zip(gradients, known, strict=True)
        ]
        if moved:
            self._copies = []
            self._tensors = [self._tensors_of(each) for each in self._parameters]
            self._addresses = addresses
        if moved or kinds != self._gradient_kinds:
            self._gradient_kinds = kinds
            self._build_launches()

    def _tensors_of(self, parameter: Tensor) -> UpdatedTensors:
        states = self._states[parameter]
        weight, low = self._contiguous(local_part(parameter)), states.get("low")
        starts, length = None, weight.numel()
        if states["exp_avg"].dtype == torch.bfloat16:
            width = weight.shape[-1] if weight.ndim else 1
            starts, length = index_runs(parameter, slice(0, weight.numel() // max(1, width)))
        return UpdatedTensors(
            weight=weight,
            low=None if low is None else self._contiguous(low),
            states={key: value for key, value in states.items() if key.startswith("exp_avg")},
            starts=starts,
            run_length=length,
        )

    def _contiguous(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or memory for a contiguous copy of it, which `run` fills and copies back."""
        if tensor.is_contiguous():
            return tensor
        copy = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self._copies.append((tensor, copy))
        return copy

    def _build_launches(self) -> None:
        from trimaran.parallel.optimizer.kernels import adamw as kernels  # noqa: PLC0415  needs Triton

        by_kind: dict[LaunchKind, list[int]] = {}
        for index, (tensors, gradient) in enumerate(zip(self._tensors, self._gradient_kinds, strict=True)):
            if tensors.weight.numel():
                by_kind.setdefault(tensors.kind(gradient), []).append(index)
        rows = [self._row(index) for index in range(len(self._tensors))]
        programs: dict[LaunchKind, ProgramMap] = {}
        for kind, indices in by_kind.items():
            per_program = kernels.PARTS * (kernels.BLOCKS if kind.moments == torch.uint8 else kernels.VALUES)
            counts = [-(-rows[index][kernels.SIZE] // per_program) for index in indices]
            programs[kind] = ProgramMap(indices, counts, self._steps.device)
            for index, first in zip(indices, programs[kind].firsts, strict=True):
                rows[index][kernels.PROGRAM] = first
        self._table = to_device(torch.tensor(rows, dtype=torch.int64), self._steps.device)
        self._launches = [self._launch(kind, each) for kind, each in programs.items()]

    def _row(self, index: int) -> list[int]:
        """Return a row of the table of parameters, see `kernels.adamw`."""
        tensors, rows = self._tensors[index], 1
        if tensors.in_blocks:
            rows = tensors.weight.numel() // max(1, tensors.width)
        size = rows * num_blocks(tensors.width) if tensors.in_blocks else tensors.weight.numel()
        starts = 0 if tensors.starts is None else tensors.starts.data_ptr()
        numbers = [size, tensors.width, starts, tensors.run_length, self._name_hashes[index], self._group_of[index], 0]
        return tensors.addresses() + numbers

    def _launch(self, kind: LaunchKind, programs: ProgramMap) -> Callable[..., None]:
        from trimaran.parallel.kernels.tensor_sums import DTYPES  # noqa: PLC0415
        from trimaran.parallel.optimizer.kernels import adamw as kernels  # noqa: PLC0415  needs Triton

        device, count = self._steps.device, len(self._parameters)
        options: dict[str, Any] = {
            "GRADIENT_TYPE": DTYPES[kind.gradient], "WEIGHT_TYPE": DTYPES[kind.weight], "HAS_LOW": kind.has_low,
            "ALIGNED": kind.aligned, "PARTS": kernels.PARTS, "num_warps": kernels.NUM_WARPS,
        }  # fmt: skip
        if kind.moments == torch.uint8:
            kernel, options = kernels.update_blocks, options | {"BLOCKS": kernels.BLOCKS, "BLOCK": BLOCK}
            own = [table(device, signed=signed) for signed in (True, False) for table in (codebook, lower_bounds)]
        else:
            kernel, own, rounded = kernels.update_values, [self._steps], kind.moments == torch.bfloat16
            options |= {"ROUNDED": rounded, "HAS_RUNS": kind.has_runs, "VALUES": kernels.VALUES}

        def update(gradients: Tensor, groups: Tensor, corrections: Tensor, *numbers: Tensor | None) -> None:
            kernel[(programs.count,)](
                self._table, gradients, programs.owners, groups, corrections, *own, *numbers, count, **options
            )

        return update


def _contiguous_gradient(parameter: Tensor) -> Tensor | None:
    gradient = parameter.grad
    if is_dtensor(gradient):
        if is_dtensor(parameter):
            assert gradient.placements == parameter.placements, "a gradient is sharded as its parameter is"
        gradient = gradient.to_local()
    return gradient if gradient is None or gradient.is_contiguous() else gradient.contiguous()
