"""The adapters of one layer as the planner sees them: which linear layers have one, and how large it is."""

from dataclasses import dataclass
from typing import Literal, NamedTuple


class LinearShape(NamedTuple):
    """A linear layer: its module name, its width, and which side tensor parallelism splits."""

    name: str
    inputs: int
    outputs: int
    tp_splits: Literal["outputs", "inputs", "nothing"]

    def on_rank(self, tp: int) -> tuple[int, int]:
        """Return inputs and outputs on one tensor-parallel rank."""
        inputs = self.inputs // tp if self.tp_splits == "inputs" else self.inputs
        return inputs, self.outputs // tp if self.tp_splits == "outputs" else self.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAdapter:
    """Low-rank matrices beside the frozen linear layers `targets` of one layer.

    has_magnitude: DoRA also trains one factor for each output.
    has_dropout: each adapter drops elements of its input, so that linear layers no longer share it.
    is_4bit: the frozen linear layers are stored as 4-bit NormalFloat (NF4).
    """

    rank: int
    targets: tuple[str, ...]
    has_magnitude: bool = False
    has_dropout: bool = False
    is_4bit: bool = False

    def parameters(self, linear: LinearShape, tp: int = 1) -> int:
        """Return the trained parameters beside a linear layer: those that one tensor-parallel rank holds."""
        inputs, outputs = linear.on_rank(tp)
        return self.rank * (inputs + outputs) + outputs * self.has_magnitude
