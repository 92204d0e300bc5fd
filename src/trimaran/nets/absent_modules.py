"""Modules in place of those that another pipeline stage holds, and the stream that enters and leaves a stage."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

STREAM_ARGUMENT = "trimaran_stream"  # of the model's call: the stream that enters the stage


class StageStream:
    """The stream that enters and leaves a stage during one call of the model."""

    def __init__(self) -> None:
        self.entering: Tensor | None = None
        self.leaving: Tensor | None = None

    def take(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """Take the stream out of the arguments of the model's call. It has passed through FSDP's hooks by now."""
        self.leaving, self.entering = None, kwargs.pop(STREAM_ARGUMENT, None)
        return args, kwargs

    def give(self, _: nn.Module, args: Any, output: Any) -> Any:
        """Return the stream instead of logits, before FSDP's hooks see what the model returns."""
        leaving, self.entering, self.leaving = self.leaving, None, None
        return output if leaving is None else leaving


class AbsentLayer(nn.Module):
    """In place of a layer of another stage. It returns its input, in the form in which the layer does.

    Before the first layer of this stage it returns the stream that enters; after the last one it keeps the stream that
    leaves. `attributes` are the layer's own that are numbers or text, which the model may read.
    """

    def __init__(self, stream: StageStream, num_outputs: int, attributes: Mapping[str, Any]) -> None:
        super().__init__()
        vars(self).update(attributes)
        self.stream, self.num_outputs = stream, num_outputs
        self.enters = self.leaves = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        if self.enters:
            assert self.stream.entering is not None, "a stage after the first needs the stream of the one before"
            hidden = self.stream.entering
        if self.leaves:
            self.stream.leaving = hidden
        return (hidden, *[None] * (self.num_outputs - 1)) if self.num_outputs else hidden


class AbsentModule(nn.Module):
    """In place of an embedding, a norm or a head of another stage. Its result is not used, only its shape.

    A module before the layers that changes the `width` returns zeros of that width; others return their input.
    `is_embedding`: its input has no width yet.
    """

    def __init__(self, width: int = 0, *, is_embedding: bool = False) -> None:
        super().__init__()
        self.width, self.is_embedding = width, is_embedding

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        if not self.width:
            return given
        shape = given.shape if self.is_embedding else given.shape[:-1]
        return torch.zeros(*shape, self.width, device=given.device)
