"""Cuts any module whose blocks stand in a list into pipeline stages, by what one call of it shows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.core import UserError
from trimaran.nets import AbsentLayer, LayerCall, StageStream, read_parameters, record_layer, tensors_in

Forward = Callable[[Any], tuple[Tensor, int | Tensor]]  # takes the rows of a batch, returns summed loss and count


class StageEnd(Exception):  # noqa: N818 - it ends the call of a stage, and is no error
    """Ends the user's forward where the stream leaves the stage."""

    def __init__(self, stream: Tensor) -> None:
        super().__init__()
        self.stream = stream


class EndingLayer(AbsentLayer):
    """In place of the first layer of the next stage: it ends the call."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise StageEnd(args[0] if args else kwargs["hidden_states"])


class UnusedModule(nn.Module):
    """In place of a module whose weights are read before the layers, in a later stage: it returns zeros.

    `shape` is that of its result for `rows` rows; the module returns as many rows as `current` says.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, rows: int, current: list[int]) -> None:
        super().__init__()
        self.shape, self.dtype, self.rows, self.current = shape, dtype, rows, current

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        first = self.current[0] if self.shape[0] == self.rows else self.shape[0]
        device = next((each.device for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        return torch.zeros(first, *self.shape[1:], dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockList:
    """The list of blocks in a module, and the modules around it; see `LayerList` for transformers models.

    `outputs` are the shape and dtype of what each module before the blocks returned for `rows` rows. `stream` is the
    shape and dtype of what passes between blocks. `tied` are parameters that are read before and after the blocks.
    """

    name: str
    rows: int
    num_outputs: tuple[int, ...]
    stream: tuple[torch.Size, torch.dtype]
    before: frozenset[str]
    after: frozenset[str]
    tied: frozenset[str]
    outputs: Mapping[str, tuple[torch.Size, torch.dtype]]

    @property
    def count(self) -> int:
        return len(self.num_outputs)


def find_blocks(model: nn.Module, forward: Forward, batch: Any, rows: int) -> BlockList:
    """Return the blocks of a module. Raises UserError if it cannot be cut between them."""
    lists = [
        (name, each)
        for name, each in model.named_modules()
        if name and isinstance(each, nn.ModuleList | nn.Sequential) and len(each) > 1
    ]
    if not lists:
        raise _uncuttable("the model has no nn.ModuleList or nn.Sequential of blocks")
    name, stack = max(lists, key=lambda pair: sum(each.numel() for each in pair[1].parameters()))
    calls, outputs = list[LayerCall](), dict[str, tuple[torch.Size, torch.dtype]]()

    def record(path: str, _: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim:
            outputs[path] = output.shape, output.dtype

    handles = [hook for number, layer in enumerate(stack.children()) for hook in record_layer(layer, number, calls)]
    for path, part in model.named_modules():
        if any(True for _ in part.parameters(recurse=False)) and not path.startswith(f"{name}."):
            handles.append(part.register_forward_hook(partial(record, path)))
    try:
        loss, _ = forward(batch)
    finally:
        for handle in handles:
            handle.remove()
    if [call.layer for call in calls] != list(range(sum(1 for _ in stack.children()))):
        raise _uncuttable(f"the blocks of {name} do not run once each, in the order of the list")
    owners = {id(each): parameter for parameter, each in model.named_parameters()}
    node = None
    for call in calls:
        where = f"{name}.{call.layer}"
        assert call.leaving is not None
        if node is not None and call.entering_node is not node:
            raise _uncuttable(f"the stream changes between {name}.{call.layer - 1} and {where}")
        if call.leaving.shape != call.entering.shape or call.leaving.dtype != call.entering.dtype:
            raise _uncuttable(f"{where} returns another shape or dtype than it gets")
        if other := next((key for key, each in tensors_in(call.inputs) if each.requires_grad), ""):
            raise _uncuttable(f"{where} gets {other}, which depends on weights, besides the stream")
        read = read_parameters(call.leaving.grad_fn, call.entering_node, owners)
        if foreign := sorted(each for each in read if not each.startswith(f"{where}.")):
            raise _uncuttable(f"{where} depends on {foreign[0]}: blocks share weights or values")
        node = call.leaving.grad_fn
    if calls[0].entering.shape[:1] != (rows,):
        raise _uncuttable("the first dimension of the stream is not the rows of the batch")
    first, last = calls[0], calls[-1]
    assert last.leaving is not None
    before = read_parameters(first.entering_node, None, owners)
    after = read_parameters(loss.grad_fn, last.leaving.grad_fn, owners)
    if inside := sorted(each for each in before | after if each.startswith(f"{name}.")):
        raise _uncuttable(f"{inside[0]} is read outside of its block")
    unused = {each for each in owners.values() if not each.startswith(f"{name}.")} - before - after
    called = frozenset(outputs)
    return BlockList(
        name=name,
        rows=rows,
        num_outputs=tuple(call.num_outputs for call in calls),
        stream=(first.entering.shape, first.entering.dtype),
        before=_holders(model, owners, before, called) | _holders(model, owners, unused),
        after=_holders(model, owners, after),
        tied=frozenset(before & after),
        outputs=outputs,
    )


def cut_module(model: nn.Module, blocks: BlockList, part: range, current: list[int]) -> StageStream:
    """Remove from the module, in place, what belongs to other stages than that with the blocks of `part`.

    `current` holds the number of rows of the micro-batch that runs.
    """
    stream, stack = StageStream(), model.get_submodule(blocks.name)
    for number, _ in enumerate(list(stack.children())):
        if number not in part:
            kind = EndingLayer if number == part.stop else AbsentLayer
            setattr(stack, str(number), kind(stream, blocks.num_outputs[number], {}))
    if part.start > 0:
        absent: Any = stack.get_submodule(str(part.start - 1))
        absent.enters = True
        kept = blocks.after if part.stop == blocks.count else frozenset()
        for name in blocks.before - kept:
            result = blocks.outputs.get(name)
            _replace(model, name, UnusedModule(*result, blocks.rows, current) if result else nn.Module())
    if part.stop < blocks.count:
        for name in blocks.after - blocks.before:
            _replace(model, name, nn.Module())  # the call ends before it
    return stream


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, new)


def _holders(
    model: nn.Module, owners: Mapping[int, str], parameters: set[str], called: frozenset[str] | None = None
) -> frozenset[str]:
    """Return the modules that hold the parameters, under any of their names. `called` are those that ran."""
    found = set()
    for name, part in model.named_modules():
        if not any(owners[id(each)] in parameters for each in part.parameters(recurse=False)):
            continue
        if not name or any(True for _ in part.children()):
            raise _uncuttable(f"{name or 'the model itself'} has parameters outside of the blocks, and parts of its "
                              "own: put the parameters in a module that is called")  # fmt: skip
        found.add(name)
    if called is not None and not found & called and found:
        raise _uncuttable(f"{min(found)} is used before the blocks without being called")
    return frozenset(found)


def _uncuttable(reason: str) -> UserError:
    return UserError("P103.model-cannot-cut", where="prepare(plan=...)", reason=reason)
