"""AdamW whose states are small, or live on the host, and whose weights may be two halves."""

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trimaran.nets.local_shards import local_part
from trimaran.optim.moments import FORMATS, Constants, Moments, StateChunk, States, move, words
from trimaran.optim.state_streaming import StateStream
from trimaran.optim.stochastic_rounding import Runs, runs, salt
from trimaran.parallel.gradient_norm import gradient_of

Kernel = Callable[[StateChunk, States, Tensor | None], None]
SMALL = 4096  # values: a parameter with fewer is not worth eight bits
PIECE = 2**23  # values that are moved at once: bounds what a step needs besides the states
ROWS = 16  # of which a piece has a multiple, so that each begins where a vector of any type may
NOT_MOMENTS = ("step", "low")


class LeanAdamW(Optimizer):
    """AdamW with its moments in one of three formats, on the parameters' device or on the host.

    Takes groups of named parameters. It works on the part of each parameter that is here, whatever meshes they are
    split over. States are plain tensors, shaped as that part, and exist from the start. A parameter in `lows` is bf16
    and the upper half of a weight; its lower half (see `halves`), given there, is moved with it.

    Before a step, `factor` may say what the gradients are to be multiplied by, and `found_inf` (torch's own AdamW has
    it too) that nothing is to move: each a tensor of one element beside the weights. On a GPU the host looks at
    neither, and waits for nothing.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        defaults: dict[str, Any],
        states: str,
        seed: int,
        on_host: bool,
        lows: Mapping[Any, Tensor],
    ) -> None:
        super().__init__(groups, defaults)
        self.found_inf: Tensor | None = None
        self.factor: Tensor | None = None
        self._moments: dict[Tensor, Moments] = {}
        self._runs: dict[tuple[Tensor, int, int], Runs] = {}  # they stay from step to step
        self._counts: list[tuple[Tensor, Tensor]] = []  # for each group its parameters' steps, and their salts
        for group in self.param_groups:
            device, names = group["params"][0].device, group["param_names"]
            steps = torch.zeros(len(names), device=device)
            self._counts.append((steps, torch.tensor([salt(f"{seed}/{name}") for name in names]).int().to(device)))
            for parameter, step in zip(group["params"], steps, strict=True):
                self._moments[parameter] = moments = FORMATS[_format_of(parameter, states)]
                low = {"low": lows[parameter]} if parameter in lows else {}
                self.state[parameter] = {"step": step} | _zeros(moments, local_part(parameter), on_host) | low
        device = next(iter(self._moments)).device
        self._ferry, self._kernel = StateStream(device) if on_host else None, _kernel_for(device)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyrefly: ignore[bad-override]
        """Move the weights that have a gradient, unless `found_inf` says that it is none."""
        assert closure is None, "the gradients are there already"
        if self._kernel is None and self.found_inf is not None and bool(self.found_inf):
            return
        pieces, copies = [], []
        for number, group in enumerate(self.param_groups):
            constants = Constants(**{key: group[key] for key in ("lr", "betas", "eps", "weight_decay")})
            for parameter, its_words in self._started(number, constants):
                own = [local_part(parameter), self.state[parameter].get("low")]
                tables = [None if each is None else _as_table(each) for each in own]
                copies += [(one, table) for one, table in zip(own, tables, strict=True) if not _same(one, table)]
                pieces += self._pieces(parameter, tables, its_words, constants)
        loads = [piece.states for piece in pieces]
        arrived = iter(loads) if self._ferry is None else self._ferry.cross(loads)
        for piece, states in zip(pieces, arrived, strict=True):
            self._move(piece, states)
        for tensor, table in copies:  # of what does not lie row by row in memory
            tensor.copy_(table.view(tensor.shape))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and those that were summed apart (see `gradient_of`)."""
        super().zero_grad(set_to_none)
        for parameter in self._moments:
            if hasattr(parameter, "main_grad"):
                parameter.main_grad = None  # pyrefly: ignore[missing-attribute]

    def wait(self) -> None:
        """Return when all states are where they belong: those on the host may be on their way."""
        if self._ferry is not None:
            self._ferry.wait()

    def state_dict(self) -> dict[str, Any]:
        """Return states and groups as torch's optimizers do. The states are ours, not copies."""
        self.wait()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the values of a state dict of the same parameters and formats.

        Torch's own would turn every state into the type, and move it to the device, of its parameter.
        """
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})
        for number, states in enumerate(self.state.values()):
            saved = state_dict["state"][number]
            if saved.keys() != states.keys() or any(saved[key].dtype != states[key].dtype for key in states):
                raise ValueError("the saved optimizer states are of another format")
            for key, value in states.items():
                value.copy_(saved[key])

    def _started(self, number: int, constants: Constants) -> Iterator[tuple[Tensor, Tensor]]:
        """Count a step of the parameters of a group that have a gradient, and yield each with its words."""
        parameters, (steps, salts) = self.param_groups[number]["params"], self._counts[number]
        places = [place for place, each in enumerate(parameters) if gradient_of(each) is not None]
        if not places:
            return
        # A refused step does not count. Without a kernel it has not come this far.
        one = 1.0 if self.found_inf is None or self._kernel is None else 1.0 - self.found_inf.reshape(())
        # Not `_foreach_add_`, which reads a number that is on the device back to the host.
        for counted in [steps] if len(places) == len(parameters) else [steps[place] for place in places]:
            counted.add_(one)
        table = words(steps, salts, constants)
        yield from ((parameters[place], table[place]) for place in places)

    def _pieces(
        self, parameter: Tensor, tables: list[Tensor | None], its_words: Tensor, constants: Constants
    ) -> Iterator[StateChunk]:
        (weight, low), gradient, states = tables, gradient_of(parameter), self.state[parameter]
        assert gradient is not None
        assert weight is not None
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            assert gradient.placements == parameter.placements, "the gradient is split as its parameter is"
        gradient = _as_table(local_part(gradient))
        moments = {key: _as_table(value) for key, value in states.items() if key not in NOT_MOMENTS}
        height = max(ROWS, PIECE // max(1, weight.shape[1]) // ROWS * ROWS)
        if self._kernel is not None and self._ferry is None:
            height = len(weight)  # it needs no memory besides
        for start in range(0, len(weight) if weight.numel() else 0, max(1, height)):
            rows = slice(start, min(start + height, len(weight)))
            yield StateChunk(
                weight=weight[rows],
                low=None if low is None else low[rows],
                gradient=gradient[rows],
                states={key: value[rows] for key, value in moments.items()},
                factor=self.factor,
                step=states["step"],
                words=its_words,
                constants=constants,
                parameter=parameter,
                runs=self._runs_of(parameter, rows),
            )

    def _runs_of(self, parameter: Tensor, rows: slice) -> Runs | None:
        """Return how the values of these rows are numbered, where their moments are rounded by chance."""
        if self.state[parameter]["exp_avg"].dtype != torch.bfloat16:
            return None
        key = (parameter, rows.start, rows.stop)
        if key not in self._runs:
            self._runs[key] = runs(parameter, rows)
        return self._runs[key]

    def _move(self, piece: StateChunk, states: States) -> None:
        if self._kernel is None:
            move(piece, states, self._moments[piece.parameter])
        else:
            self._kernel(piece, states, self.found_inf)


def _format_of(parameter: Tensor, states: str) -> str:
    """Return how the moments of a parameter are kept. Its whole decides, not the part that a plan has left here."""
    worth_it = parameter.ndim >= 2 and parameter.numel() >= SMALL
    return "fp32" if states == "8bit" and not worth_it else states


def _zeros(moments: Moments, part: Tensor, on_host: bool) -> States:
    """Return the first states of a parameter. On the host of a GPU they are pinned, so that copies need not wait."""
    device = torch.device("cpu") if on_host else part.device
    pinned = on_host and part.device.type != "cpu"
    return {
        key: torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)
        for key, (shape, dtype) in moments.layout(tuple(part.shape)).items()
    }


def _kernel_for(device: torch.device) -> Kernel | None:
    """Return our own kernel, which needs Triton; none on a CPU."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from trimaran.optim.kernels.adamw import move_on_gpu  # noqa: PLC0415  Triton is there where CUDA is

    return move_on_gpu


def _as_table(tensor: Tensor) -> Tensor:
    """Return the tensor as a table whose rows are its last dimension: a view, or a copy where it lies otherwise."""
    width = tensor.shape[-1] if tensor.ndim else 1
    return tensor.contiguous().view(tensor.numel() // max(1, width), width)


def _same(tensor: Tensor | None, table: Tensor | None) -> bool:
    return tensor is None or table is None or tensor.data_ptr() == table.data_ptr()
