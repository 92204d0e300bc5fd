"""The optimizers of a loop: which ones `prepare` takes, and for which parameters."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from trimaran.core import UserError

WHERE = "prepare(model, optimizer)"
# Their states have another shape than the parameters, and are computed from whole rows, columns or blocks.
WHOLE_TENSOR_OPTIMIZERS = ("Adafactor",)
WHOLE_TENSOR_PACKAGES = ("bitsandbytes",)


def checked_optimizers(
    model: nn.Module, optimizers: Optimizer | Sequence[Optimizer], *, is_sharded: bool
) -> tuple[Optimizer, ...]:
    """Return the optimizers of `model`. Raise UserError if one of them would not train it, or not on several ranks."""
    found = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
    if not found or not all(isinstance(each, Optimizer) for each in found):
        raise UserError("P131.second-argument-prepare", where=WHERE)
    for optimizer in found:
        kind = type(optimizer).__name__
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UserError("P131.computes-loss-several", where=WHERE, kind=kind)
        is_whole = kind in WHOLE_TENSOR_OPTIMIZERS or type(optimizer).__module__.startswith(WHOLE_TENSOR_PACKAGES)
        if is_sharded and is_whole:
            raise UserError("P131.keeps-states-whole", where="prepare(sharding=...)", kind=kind)
    names = {id(each): name for name, each in model.named_parameters()}
    seen: dict[int, str] = {}
    for optimizer in found:
        kind = type(optimizer).__name__
        groups = enumerate(group["params"] for group in optimizer.param_groups)
        for group, number, parameter in ((group, *each) for group, some in groups for each in enumerate(some)):
            if id(parameter) not in names:
                raise UserError(
                    "P130.trains-parameter-model",
                    where=WHERE,
                    kind=kind,
                    number=number,
                    group=group,
                    parameter_shape=list(parameter.shape),
                )
            if id(parameter) in seen:
                raise UserError(
                    "P131.trained-twice", where=WHERE, names=names[id(parameter)], seen=seen[id(parameter)], kind=kind
                )
            seen[id(parameter)] = kind
    return found


def parameters_of(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    return [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]


def replace_parameters(
    optimizers: Sequence[Optimizer], names: Mapping[int, str], sharded: Mapping[str, nn.Parameter]
) -> None:
    """Give optimizers the sharded parameters in place of those they were made with. `names` are by id of the old."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [sharded[names[id(each)]] for each in group["params"]]


@contextmanager
def explained_errors(optimizer: Optimizer, *, is_sharded: bool) -> Iterator[None]:
    """Raise UserError for torch's errors in an update of sharded parameters: the optimizer does not support them."""
    try:
        yield
    except (RuntimeError, NotImplementedError, TypeError, AssertionError, AttributeError) as error:
        if not is_sharded:
            raise
        kind = type(optimizer).__name__
        raise UserError(
            "P131.cannot-update-sharded",
            where="loop.step()",
            optimizer=kind,
            error_kind=type(error).__name__,
            error=error,
        ) from error
