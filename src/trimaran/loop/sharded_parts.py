"""Lets a loop call parts and methods of a sharded model: FSDP itself gathers weights for forwards only."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trimaran.core import UserError
from trimaran.loop.call_order import CallOrder
from trimaran.loop.wrap_blocks import WITHOUT_FORWARD
from trimaran.parallel.axes.fsdp import own_parameter_groups
from trimaran.parallel.comm.json_exchange import all_gather_int64

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
        raise UserError("P136", f"this model cannot be sharded: {error}", where="prepare(sharding=...)",
                        fix="use wrap=... with modules that share no weights") from None  # fmt: skip
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
                raise UserError("P139", "ranks have called different blocks of the sharded model, or in another order: "
                                f"their weights of the last {CHECK_EVERY} steps were mixed up", where="loop.step()",
                                fix="call the same blocks on every rank, with a result that is multiplied by 0 where "
                                "it does not count, or use sharding='none'")  # fmt: skip

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
        """Let the methods that the user's classes define find gathered weights."""
        for name in _methods_of(module):
            setattr(module, name, self._wrapped(getattr(module, name)))

    def _wrapped(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_running():
                return method(*args, **kwargs)
            args, kwargs = self._enter(args, kwargs)
            versions, output = self._versions(), None
            try:
                output = method(*args, **kwargs)
                if self._versions() != versions:
                    raise UserError("P136", f"{method.__qualname__} changes weights in place, but the model is sharded,"
                                    " and the method has gathered copies of them", where=method.__qualname__,
                                    fix="make the change outside of the class, on model.parameters(), under "
                                    "torch.no_grad()")  # fmt: skip
            finally:
                output = self._leave(args, output)
            return output

        return call

    def _is_running(self) -> bool:
        """Return whether the unit's own forward, or another call, has gathered the weights already."""
        return self._depth > 0 or self._state._training_state.name == "FORWARD"

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
            raise UserError("P136", f"{name} has sparse gradients, which cannot be sharded",
                            where="prepare(sharding=...)", fix="use sharding='none', or sparse=False")  # fmt: skip


@contextmanager
def explained_double_backward() -> Iterator[None]:
    """Raise UserError for torch's error if a second derivative needs weights that FSDP has freed."""
    try:
        yield
    except RuntimeError as error:
        if FREED not in str(error):
            raise
        what = "the loss contains derivatives of the model (a gradient penalty), which need whole weights"
        raise UserError("P136", what, where="loop.backward(loss)", fix="use sharding='none'") from error


def check_is_plain(loss: Tensor) -> None:
    """Raise UserError if the loss was computed from shards of the weights."""
    if type(loss) is not Tensor:
        raise _mixed(f"the loss is a {type(loss).__name__}: it was computed from weights, of which a rank has a shard")


def _outside_of_units(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield child
            yield from _outside_of_units(child)


def _methods_of(module: nn.Module) -> Iterator[str]:
    """Yield the methods that the classes of a model define, except those of torch and of base classes of libraries."""
    seen = set()
    for cls in type(module).__mro__:
        is_own = issubclass(cls, nn.Module) and not cls.__module__.startswith("torch.")
        if not is_own or cls.__name__ in FRAMEWORK_BASES:
            continue
        for name, value in vars(cls).items():
            is_method = inspect.isfunction(value) and not inspect.isgeneratorfunction(value)
            if is_method and name not in seen and name != "forward" and not hasattr(nn.Module, name):
                seen.add(name)
                yield name


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
