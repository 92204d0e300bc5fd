"""AdamW whose states are small, or live on the host, or both."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trimaran.nets.shards import local_part
from trimaran.train.optimizer.ferry import Ferry
from trimaran.train.optimizer.moments import Constants, Exact, Moments, Piece, Quantised, Rounded, States

SMALL = 4096  # values: a parameter with fewer is not worth eight bits
PIECE = 2**23  # values that are moved at once: bounds what a step needs besides the states
ROWS = 16  # of which a piece has a multiple, so that each begins where a vector of any type may


class LeanAdamW(Optimizer):
    """AdamW with its moments in one of three formats, on the parameters' device or on the host.

    Takes groups of named parameters. It works on the part of each parameter that is here, whatever meshes they are
    split over. States are plain tensors, shaped as that part, and exist from the start.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        defaults: dict[str, Any],
        states: str,
        seed: int,
        on_host: bool,
        compiled: bool,
    ) -> None:
        super().__init__(groups, defaults)
        self._seed = seed
        self.found_inf: Tensor | None = None  # torch's own AdamW has it too
        formats: dict[str, Moments] = {
            "fp32": Exact(),
            "bf16": Rounded(compiled=compiled),
            "8bit": Quantised(compiled=compiled),
        }
        self._moments: dict[Tensor, Moments] = {}
        for parameter in (each for group in self.param_groups for each in group["params"]):
            self._moments[parameter] = moments = formats[_format_of(parameter, states)]
            self.state[parameter] = {"step": torch.tensor(0.0)} | _zeros(moments, local_part(parameter), on_host)
        device = next(iter(self._moments)).device
        self._ferry = Ferry(device) if on_host else None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyrefly: ignore[bad-override]
        """Move the weights that have a gradient, unless `found_inf` says that it is none.

        The host looks at that, and waits for the device once a step: how states cross from the host and back is for it
        to arrange.
        """
        assert closure is None, "the gradients are there already"
        if self.found_inf is not None and bool(self.found_inf):
            return
        pieces, copies = [], []
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if parameter.grad is not None:
                    weight = local_part(parameter)
                    table = weight.contiguous().view(_table(weight))
                    copies += [] if weight.is_contiguous() else [(weight, table)]
                    pieces += self._pieces(name, parameter, table, group)
        loads = [piece.states for piece in pieces]
        arrived = iter(loads) if self._ferry is None else self._ferry.cross(loads)
        for number, states in enumerate(arrived):
            self._moments[pieces[number].parameter].move(pieces[number], states)
        for weight, table in copies:  # of a weight that does not lie row by row in memory
            weight.copy_(table.view(weight.shape))

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

    def _pieces(self, name: str, parameter: Tensor, weight: Tensor, group: dict[str, Any]) -> Iterator[Piece]:
        gradient, states = parameter.grad, self.state[parameter]
        assert gradient is not None
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            assert gradient.placements == parameter.placements, f"the gradient of {name} is split in another way"
        states["step"] += 1
        constants = Constants(
            step=int(states["step"]),
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )
        gradient = local_part(gradient).contiguous().view(weight.shape)
        tables = {key: value.view(_table(value)) for key, value in states.items() if key != "step"}
        height = max(ROWS, PIECE // max(1, weight.shape[1]) // ROWS * ROWS)
        for start in range(0, len(weight) if weight.numel() else 0, height):
            rows = slice(start, min(start + height, len(weight)))
            yield Piece(
                weight=weight[rows],
                gradient=gradient[rows],
                states={key: value[rows] for key, value in tables.items()},
                constants=constants,
                parameter=parameter,
                rows=rows,
                key=f"{self._seed}/{name}/{constants.step}",
            )


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


def _table(tensor: Tensor) -> tuple[int, int]:
    """Return the shape of the table whose rows are the tensor's last dimension."""
    width = tensor.shape[-1] if tensor.ndim else 1
    return (tensor.numel() // max(1, width), width)
