"""A sharded model in a loop: which blocks are gathered, parts and methods called alone, copies of the weights."""

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trimaran.core import UserError, templated
from trimaran.loop.loop_context import CallOrder
from trimaran.nets import local_part
from trimaran.parallel import all_gather_int64, own_parameter_groups

Wrap = type[nn.Module] | Sequence[type[nn.Module]] | int
WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def blocks_of(model: nn.Module, wrap: Wrap | None, *, is_sharded: bool) -> tuple[nn.Module, ...]:
    """Return the modules that are gathered one at a time, in the order of the model; see `trimaran.prepare`."""
    if wrap is None:
        stacks = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) > 1]
        largest = max(stacks, key=lambda stack: sum(each.numel() for each in stack.parameters()), default=())
        return tuple(_without_shared(dict.fromkeys(_with_forward(largest)), model))
    if not is_sharded:
        raise _wrong("wrap says how a sharded model is gathered, and sharding is 'none'",
                     "leave it out, or set sharding='parameters'")  # fmt: skip
    if isinstance(wrap, bool) or (isinstance(wrap, int) and wrap < 1):
        raise _wrong(
            templated("wrap={wrap!r} is not a number of parameters", wrap=wrap),
            "pass 1_000_000, or a class: wrap=Block",
        )
    found = tuple(_of_size(model, wrap) if isinstance(wrap, int) else _of_classes(model, _classes(wrap)))
    if not found:
        kinds = ", ".join(sorted({type(each).__name__ for each in model.modules()} - {type(model).__name__})[:12])
        if isinstance(wrap, int):
            raise _wrong(
                templated("no module below {kind} has {wrap:,} parameters", kind=type(model).__name__, wrap=wrap),
                "pass a smaller number",
            )
        names = ", ".join(each.__name__ for each in _classes(wrap))
        raise _wrong(
            templated("{kind} has no module of {names}", kind=type(model).__name__, names=names),
            templated("its modules are {kinds}", kinds=kinds),
        )
    return found


def _classes(wrap: Wrap) -> tuple[type[nn.Module], ...]:
    classes = (wrap,) if isinstance(wrap, type) else tuple(wrap) if isinstance(wrap, Sequence) else (wrap,)
    if not all(isinstance(each, type) and issubclass(each, nn.Module) for each in classes):
        raise _wrong(
            templated("wrap={wrap!r:.80} has something that is no class of modules", wrap=wrap),
            "pass a class: wrap=Block",
        )
    return classes  # type: ignore[return-value]


def _of_classes(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    """Yield the outermost modules of these classes."""
    for child in module.children():
        if isinstance(child, classes) and not isinstance(child, WITHOUT_FORWARD):
            yield child
        else:
            yield from _of_classes(child, classes)


def _of_size(module: nn.Module, least: int) -> Iterator[nn.Module]:
    """Yield the smallest modules with at least so many parameters: no part of one has as many."""
    for child in module.children():
        if sum(each.numel() for each in child.parameters()) < least:
            continue
        inner = tuple(_of_size(child, least))
        if inner or isinstance(child, WITHOUT_FORWARD):
            yield from inner
        else:
            yield child


def _with_forward(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for each in modules:
        if isinstance(each, WITHOUT_FORWARD):
            yield from _with_forward(each.children())
        elif any(True for _ in each.parameters()):
            yield each


def _without_shared(blocks: Iterable[nn.Module], model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of which no parameter belongs to a module outside of them, too: one unit gathers a parameter."""
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for each in module.parameters(recurse=False):
            owners.setdefault(each, set()).add(module)
    for block in blocks:
        inside = set(block.modules())
        if all(owners[each] <= inside for each in block.parameters()):
            yield block


def _wrong(what: str, fix: str) -> UserError:
    return UserError("K083", what, where="prepare(wrap=...)", fix=fix)


FIRST_STEPS, CHECK_EVERY = 2, 100
FRAMEWORK_BASES = ("PreTrainedModel", "ModelMixin", "LightningModule", "PyTorchModelHubMixin")
MIXED = "mixed torch.Tensor and DTensor"  # of torch's message
FREED = "storage of size 0"  # the same, for weights that were freed after they were used


def gather_for_parts(model: nn.Module, before_call: Callable[[], None]) -> None:
    """Gather the weights of a sharded model when the loop calls a part or a method of it, as for the model itself.

    Parts are the modules outside of the blocks; they belong to the root unit. A block gathers its own weights.
    `before_call` runs before every such call.
    """
    assert isinstance(model, FSDPModule)
    try:
        model._get_fsdp_state()._lazy_init()  # in the first forward otherwise, of which this must be the root
    except ValueError as error:
        raise UserError("P136.model-cannot-sharded", where="prepare(sharding=...)", error=error) from None
    root = UnitCalls(model, before_call)
    model.register_forward_pre_hook(root.note_enter, prepend=True)
    model.register_forward_hook(root.note_leave, always_call=True)
    root.wrap_methods(model)
    for part in _outside_of_units(model):
        if not isinstance(part, WITHOUT_FORWARD):
            part.register_forward_pre_hook(root.enter_part, with_kwargs=True, prepend=True)
            part.register_forward_hook(root.leave_part, always_call=True)
            root.wrap_methods(part)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.unshard()  # torch fails after micro-batches that do not use a unit, if nothing ever has
            unit.reshard()
            if unit is not model:
                UnitCalls(unit, before_call).wrap_methods(unit)
    _explain_mixed_tensors()


class UnitOrder:
    """Checks that all ranks call the same blocks in the same order: else they gather weights of different ones.

    In the first steps ranks wait for each other at every block. Later the order is compared now and then.
    """

    def __init__(self, model: nn.Module, calls: CallOrder) -> None:
        self._calls, self._num_steps, self._order = calls, 0, 0
        if calls.world_size > 1:
            for number, (name, each) in enumerate(model.named_modules()):
                if not isinstance(each, FSDPModule) or each is model:
                    continue
                each.register_forward_pre_hook(functools.partial(self._note, number, name), prepend=True)  # pyrefly: ignore

    def check(self) -> None:
        """Compare the order of all blocks since the start, after some of the steps. Every rank must call it."""
        self._num_steps += 1
        if self._calls.world_size > 1 and self._num_steps % CHECK_EVERY == 0:
            orders = all_gather_int64(np.array([self._order]))
            if (orders != orders[0]).any():
                raise UserError("P139.ranks-called-different", where="loop.step()", check_every=CHECK_EVERY)

    def _note(self, number: int, name: str, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._order = (self._order * 1_000_003 + number) % (1 << 61)
        if self._num_steps < FIRST_STEPS:
            self._calls.meet(f"a call of {name}", fix="call the same blocks of a sharded model on every rank, in the "
                             "same order, or use sharding='none'")  # fmt: skip


class UnitCalls:
    """Runs calls of the parts and methods of an FSDP unit as forwards of it."""

    def __init__(self, unit: nn.Module, before_call: Callable[[], None]) -> None:
        assert isinstance(unit, FSDPModule)
        self._unit, self._state, self._before_call = unit, unit._get_fsdp_state(), before_call
        self._depth = 0

    def note_enter(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._depth += 1

    def note_leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._depth -= 1

    def enter_part(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if torch.compiler.is_compiling() else self._enter(args, kwargs)

    def leave_part(self, module: nn.Module, args: Any, output: Any) -> Any:
        return None if torch.compiler.is_compiling() else self._leave(args, output)

    def wrap_methods(self, module: nn.Module) -> None:
        """Let the methods that the user's classes define find gathered weights: not those of torch and of libraries."""
        seen = set()
        for cls in type(module).__mro__:
            is_own = issubclass(cls, nn.Module) and not cls.__module__.startswith("torch.")
            if not is_own or cls.__name__ in FRAMEWORK_BASES:
                continue
            for name, value in vars(cls).items():
                is_method = inspect.isfunction(value) and not inspect.isgeneratorfunction(value)
                if is_method and name not in seen and name != "forward" and not hasattr(nn.Module, name):
                    seen.add(name)
                    setattr(module, name, self._wrapped(getattr(module, name)))

    def _wrapped(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            # The unit's own forward, or another call, may have gathered the weights already.
            if self._depth > 0 or self._state._training_state.name == "FORWARD":
                return method(*args, **kwargs)
            args, kwargs = self._enter(args, kwargs)
            versions, output = self._versions(), None
            try:
                output = method(*args, **kwargs)
                if self._versions() != versions:
                    raise UserError(
                        "P136.changes-weights-place", where=method.__qualname__, qualname=method.__qualname__
                    )
            finally:
                output = self._leave(args, output)
            return output

        return call

    def _enter(self, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        if self._depth > 1:
            return args, kwargs
        self._before_call()
        return self._state._pre_forward(self._unit, args, kwargs)

    def _leave(self, args: Any, output: Any) -> Any:
        self._depth -= 1
        return output if self._depth else self._state._post_forward(self._unit, args, output)

    def _versions(self) -> list[int]:
        parameters = [each for group in own_parameter_groups(self._unit) for each in group.fsdp_params]
        return [each._unsharded_param._version for each in parameters if hasattr(each, "_unsharded_param")]


def give_forward(model: nn.Module) -> None:
    """Let FSDP take a container as the root: it refuses modules without a forward, but their parts may be called."""
    if isinstance(model, nn.ModuleList | nn.ModuleDict) and type(model).forward is nn.Module.forward:
        kind = type(model)
        model.__class__ = type(kind.__name__, (kind,), {"forward": _refuse_call})


def _refuse_call(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    raise NotImplementedError(f"a {type(self).__name__} has no forward: call its parts")


def check_shardable(model: nn.Module) -> None:
    """Raise UserError if the model has parts that FSDP does not support."""
    for name, each in model.named_modules():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse:
            raise UserError("P136.sparse-gradients", where="prepare(sharding=...)", name=name)


@contextmanager
def explained_double_backward() -> Iterator[None]:
    """Raise UserError for torch's error if a second derivative needs weights that FSDP has freed."""
    try:
        yield
    except RuntimeError as error:
        if FREED not in str(error):
            raise
        raise UserError("P136.loss-contains-derivatives", where="loop.backward(loss)") from error


def check_is_plain(loss: Tensor) -> None:
    """Raise UserError if the loss was computed from shards of the weights."""
    if type(loss) is not Tensor:
        raise _mixed(f"the loss is a {type(loss).__name__}: it was computed from weights, of which a rank has a shard")


def _outside_of_units(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield child
            yield from _outside_of_units(child)


def _explain_mixed_tensors() -> None:
    """Add our explanation to torch's error for code that computes with the shards of weights directly."""
    previous = sys.excepthook
    if getattr(previous, "explains_mixed_tensors", False):
        return

    def excepthook(kind: Any, error: BaseException, trace: Any) -> None:
        previous(kind, error, trace)
        if MIXED in str(error):
            sys.stderr.write(f"{_mixed('this line computes with weights, of which a rank has a shard')}\n")

    excepthook.explains_mixed_tensors = True  # pyrefly: ignore[missing-attribute]
    sys.excepthook = excepthook


def _mixed(what: str) -> UserError:
    return UserError("P136", what, where="a loop with sharding", fix="compute norms of weights with "
                     "loop.parameter_norm(), other values inside of the model's forward or methods; copy weights with "
                     "loop.copy_of(model) or loop.state_dict(); or use sharding='none'")  # fmt: skip


WHERE = "loop.copy_of(model)"


class CopyMaker:
    """Makes copies of a model that are sharded as it is. Must be created before the model is sharded.

    FSDP cannot copy a sharded model. `shard` shards a module in place, or does nothing.
    """

    def __init__(self, model: nn.Module, shard: Callable[[nn.Module], None], *, is_sharded: bool) -> None:
        self._model, self._shard, self._is_sharded = model, shard, is_sharded
        self._layout, self._failure = model, ""
        if is_sharded:  # a copy whose parameters have no values
            empty: dict[int, Any] = {
                id(each): nn.Parameter(torch.empty_like(each, device="meta"), requires_grad=False)
                for each in model.parameters()
            }
            try:
                self._layout = copy.deepcopy(model, empty)
            except Exception as error:
                self._failure = f"{type(error).__name__}: {error}"

    def make(self, device: torch.device) -> nn.Module:
        """Return a copy with the model's weights and buffers, in eval mode, without gradients."""
        if self._failure:
            raise UserError("P137.model-cannot-copied", where=WHERE, failure=self._failure)
        made = copy.deepcopy(self._layout)
        made.requires_grad_(False).eval()
        if self._is_sharded:
            self._shard(made)
            made.to_empty(device=device)
        copy_weights(self._model, made, decay=0.0)
        return made


@torch.no_grad()
def copy_weights(model: nn.Module, follower: nn.Module, *, decay: float) -> None:
    """Move a copy's weights towards the model's, leaving `decay` of the difference, and copy buffers; all locally."""
    for module in (*model.modules(), *follower.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()  # gathered weights would be outdated, or in place of the shards
    sources, targets = ([local_part(each) for each in module.parameters()] for module in (model, follower))
    if decay == 0 or not targets:
        _copy_each(sources, targets)
    else:
        torch._foreach_lerp_(targets, sources, 1 - decay)
    _copy_each(list(model.buffers()), list(follower.buffers()))


def refuse_deepcopy(model: nn.Module) -> None:
    """Let `copy.deepcopy` of a sharded model, or of a block of it, end in an error that names the way."""
    for each in model.modules():
        if isinstance(each, FSDPModule):
            vars(each)["__deepcopy__"] = _refuse


def _refuse(memo: Any) -> NoReturn:
    raise UserError("P137.sharded-model", where="copy.deepcopy(model)")


def _copy_each(sources: list[Tensor], targets: list[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
