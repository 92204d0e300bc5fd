"""Which modules of a model are all-gathered at a time, by class or by size."""

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from trimaran.core import UserError

Wrap = type[nn.Module] | Sequence[type[nn.Module]] | int
WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def blocks_of(model: nn.Module, wrap: Wrap | None, *, is_sharded: bool) -> tuple[nn.Module, ...]:
    """Return the modules that are gathered one at a time, in the order of the model; see `trimaran.prepare`."""
    if wrap is None:
        return tuple(_without_shared(_largest_list(model), model))
    if not is_sharded:
        raise _wrong("wrap says how a sharded model is gathered, and sharding is 'none'",
                     "leave it out, or set sharding='parameters'")  # fmt: skip
    if isinstance(wrap, bool) or (isinstance(wrap, int) and wrap < 1):
        raise _wrong(f"wrap={wrap!r} is not a number of parameters", "pass 1_000_000, or a class: wrap=Block")
    found = tuple(_of_size(model, wrap) if isinstance(wrap, int) else _of_classes(model, _classes(wrap)))
    if not found:
        kinds = ", ".join(sorted({type(each).__name__ for each in model.modules()} - {type(model).__name__})[:12])
        if isinstance(wrap, int):
            raise _wrong(f"no module below {type(model).__name__} has {wrap:,} parameters", "pass a smaller number")
        names = ", ".join(each.__name__ for each in _classes(wrap))
        raise _wrong(f"{type(model).__name__} has no module of {names}", f"its modules are {kinds}")
    return found


def _classes(wrap: Wrap) -> tuple[type[nn.Module], ...]:
    classes = (wrap,) if isinstance(wrap, type) else tuple(wrap) if isinstance(wrap, Sequence) else (wrap,)
    if not all(isinstance(each, type) and issubclass(each, nn.Module) for each in classes):
        raise _wrong(f"wrap={wrap!r:.80} has something that is no class of modules", "pass a class: wrap=Block")
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


def _largest_list(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the layers of the ModuleList that holds the most parameters; of a layer that is a list, its modules."""
    stacks = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) > 1]
    largest = max(stacks, key=lambda stack: sum(each.numel() for each in stack.parameters()), default=())
    return tuple(dict.fromkeys(_with_forward(largest)))


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
