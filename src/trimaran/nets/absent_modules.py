"""Cutting a model into pipeline stages: what one call shows about its layers, and modules in place of absent ones."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

STREAM_ARGUMENT = "trimaran_stream"  # of the model's call: the stream that enters the stage


@dataclass(slots=True)
class LayerCall:
    """One call of a layer: the stream before and after it, where each is in the graph, and its other inputs."""

    layer: int
    entering: Tensor
    entering_node: Any
    inputs: Mapping[str, Any]
    leaving: Tensor | None = None
    num_outputs: int = 0


def record_layer(layer: nn.Module, number: int, calls: list[LayerCall]) -> Iterator[Any]:
    """Add each call of a layer to `calls`. Yield the hooks, to remove them."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = {f"argument {place}": each for place, each in enumerate(args)} | kwargs
        name = "argument 0" if args else "hidden_states"
        entering = inputs.pop(name)
        calls.append(LayerCall(number, entering, entering.grad_fn, inputs))

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = calls[-1]
        call.leaving = output[0] if isinstance(output, tuple | list) else output
        call.num_outputs = len(output) if isinstance(output, tuple | list) else 0

    yield layer.register_forward_pre_hook(before, with_kwargs=True)
    yield layer.register_forward_hook(after)


def tensors_in(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in containers, with where they are."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, each in tree.items():
            yield from tensors_in(each, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, tuple | list):
        for each in tree:
            yield from tensors_in(each, name)


def read_parameters(node: Any, until: Any, owners: Mapping[int, str]) -> set[str]:
    """Return the parameters that a result depends on, back to the node `until` of the graph."""
    found: set[str] = set()
    seen, todo = {until, None}, [node]
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        variable = getattr(current, "variable", None)
        if variable is not None:
            found.add(owners.get(id(variable), "a weight that is made anew"))
        todo += [each for each, _ in current.next_functions]
    return found


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
    """In place of an embedding, norm or head of another stage: returns its input, or zeros of a changed `width`."""

    def __init__(self, width: int = 0, *, is_embedding: bool = False) -> None:
        super().__init__()
        self.width, self.is_embedding = width, is_embedding

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        if not self.width:
            return given
        shape = given.shape if self.is_embedding else given.shape[:-1]
        return torch.zeros(*shape, self.width, device=given.device)
