"""What a call of a model shows about its layers: in which order they run, and which weights each result depends on."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass(slots=True)
class LayerCall:
    """One call of a layer: the stream before and after it, where each is in the graph, and its other inputs."""

    layer: int
    entering: Tensor
    entering_node: Any
    inputs: Mapping[str, Any]
    leaving: Tensor | None = None
    num_outputs: int = 0


@dataclass(slots=True)
class LayerTrace:
    """A call of the whole model."""

    calls: list[LayerCall] = field(default_factory=list)
    logits: Tensor | None = None


def record_layer(layer: nn.Module, number: int, trace: LayerTrace) -> Iterator[Any]:
    """Record the calls of a layer. Yield the hooks, to remove them."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = {f"argument {place}": each for place, each in enumerate(args)} | kwargs
        name = "argument 0" if args else "hidden_states"
        entering = inputs.pop(name)
        trace.calls.append(LayerCall(number, entering, entering.grad_fn, inputs))

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = trace.calls[-1]
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
