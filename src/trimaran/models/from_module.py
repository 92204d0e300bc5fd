"""The outline of a live nn.Module, recorded while a fake-tensor copy of it runs once."""

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, groupby
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import flop_registry

from trimaran.core import Bytes, Flops, ModelSection, UserError
from trimaran.models.outline import Opaque, Outline, Tower
from trimaran.models.outline_hf import outline_from_hf
from trimaran.models.plugin_family import build_family

LISTS = (nn.ModuleList, nn.Sequential)
BYTES = ("saved_bytes", "moved_bytes", "output_bytes")  # of a record and of its block
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


def outline_from_module(module: nn.Module, *inputs: Any, **named: Any) -> Outline:
    """Return the outline of `module` as it runs on `inputs` and `named`.

    The first dimension of the first tensor counts samples. A transformers model whose configuration describes it
    completely gets that outline. Of any other, a copy runs once on fake tensors: nothing is computed, and neither the
    module nor its tensors change. It runs in the module's own training mode and precision. Every entry of a repeated
    list of modules is one block, and so is each module beside such lists; operations between two blocks are counted in
    the first. Attention is counted as the CPU's flash kernel computes it.
    """
    module = getattr(module, "_orig_mod", module)  # unwrap torch.compile
    return _outline_from_config(module) or _traced_outline(module, inputs, named)


def outline_of_family(section: ModelSection, seq_len: int) -> Outline:
    """Return the outline of the network of a plug-in's family, which is built without memory."""
    with torch.device("meta"):
        built = build_family(section)
        tokens = torch.zeros(1, seq_len, dtype=torch.long)
    outline = _traced_outline(built.module, (tokens,), {})
    return replace(outline, name=section.preset or section.family)


def _outline_from_config(module: nn.Module) -> Outline | None:
    """Return the outline from a transformers model's configuration; None if that does not describe all of it."""
    config = getattr(module, "config", None)
    if not hasattr(config, "to_dict"):
        return None
    name = type(module).__name__
    fields = json.loads(json.dumps(config.to_dict(), default=str)) | {"architectures": [name]}
    try:
        outline = outline_from_hf(fields, where=name, name=name)
    except UserError:
        return None  # the module is recorded instead
    if outline.num_parameters != _count(module.parameters()):
        return None
    trained = _count(each for each in module.parameters() if each.requires_grad)
    for number in range(len(outline.towers)):
        for frozen in combinations(outline.towers, number):
            if outline.num_parameters - sum(tower.parameters for tower in frozen) == trained:
                towers = (replace(tower, frozen=tower in frozen) for tower in outline.towers)
                return replace(outline, towers=tuple(towers))
    return None


@dataclass(slots=True)
class _Record:
    """The cost of one block so far, for all samples."""

    name: str = ""
    path: str = ""
    parameters: int = 0
    frozen: bool = False
    flops: float = 0.0
    saved_bytes: int = 0
    moved_bytes: int = 0
    output_bytes: int = 0
    num_kernels: int = 0


@dataclass(slots=True)
class _BlockLog:
    """The blocks in the order in which they were entered; operations are counted in the last of them."""

    records: list[_Record] = field(default_factory=lambda: [_Record()])
    counted: set[int] = field(default_factory=set)
    storages: dict[int, Any] = field(default_factory=dict)

    def enter(self, path: str, block: nn.Module) -> None:
        if self.records[0].name == "":
            record = self.records[0]  # operations before the first block are counted in it
        else:
            self.records.append(record := _Record())
        new = [each for each in block.parameters() if id(each) not in self.counted]
        self.counted.update(map(id, new))
        record.name, record.path, record.parameters = type(block).__name__, path, _count(new)
        own = list(block.parameters())
        record.frozen = not any(each.requires_grad for each in own) and bool(own)

    def leave(self, output: Any) -> None:
        self.records[-1].output_bytes = _seen_bytes(_tensors(output))

    def keep(self, tensor: Tensor) -> Tensor:
        """Count what is saved for backward, each storage once; weights are resident anyway."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages:
            self.storages[storage._cdata] = tensor
            self.records[-1].saved_bytes += storage.nbytes()
        return tensor


class _OperatorCounter(TorchDispatchMode):
    """Adds the FLOPs and memory traffic of every operation to the running block."""

    def __init__(self, log: _BlockLog) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        record = self.log.records[-1]
        record.flops += _flops(func, args, kwargs, out)
        operands, results = _tensors((args, kwargs)), _tensors(out)
        if not results or func._schema.name.split("::")[-1] in ALLOCATIONS:
            return out
        inside = {each.untyped_storage()._cdata for each in operands}
        is_view = all(each.untyped_storage()._cdata in inside for each in results)
        if (func._schema.is_mutable or not is_view) and (moved := _seen_bytes([*operands, *results])):
            record.moved_bytes += moved
            record.num_kernels += 1
        return out


def _traced_outline(module: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]) -> Outline:
    tensors = _tensors((inputs, named))
    if not tensors or not tensors[0].shape or not tensors[0].shape[0]:
        raise UserError("M031.no-example-input", where="inputs")
    log, mode = _BlockLog(), FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        memo = {id(each): _fake_copy(each) for each in [*module.parameters(), *module.buffers()]}
        inputs, named = tree_map_only(Tensor, _fake_copy, (inputs, named))
    try:
        fake_module = copy.deepcopy(module, memo)
        for path, block in _blocks("", fake_module):
            block.register_forward_pre_hook(lambda each, _, path=path: log.enter(path, each))
            block.register_forward_hook(lambda _, __, output: log.leave(output))
        log.storages = {
            each.untyped_storage()._cdata: each for each in [*fake_module.parameters(), *fake_module.buffers()]
        }
        with torch.enable_grad(), mode, _OperatorCounter(log), saved_tensors_hooks(log.keep, lambda each: each):
            fake_module(*inputs, **named)
    except Exception as error:
        name, first = type(module).__name__, str(error).strip().split("\n")[0][:200]
        raise UserError("M030.not-run-fake", where=name, name=name, kind=type(error).__name__, first=first) from error
    # The recorded blocks are towers: a new one begins where trained and frozen blocks alternate.
    num_samples, towers = tensors[0].shape[0], []
    for frozen, group in groupby(log.records, lambda record: record.frozen):
        records = list(group)
        blocks = [
            Opaque(
                name=record.name,
                parameters=record.parameters,
                sample_flops=Flops(record.flops / num_samples),
                num_kernels=record.num_kernels,
                **{each: Bytes(ceil(getattr(record, each) / num_samples)) for each in BYTES},
            )
            for record in records
        ]
        common = {record.path.split(".")[0] for record in records}
        label = common.pop() if len(common) == 1 and len(records) > 1 else "network"
        taken = sum(tower.name.split("-")[0] == label for tower in towers)
        tower = Tower(
            name=f"{label}-{taken + 1}" if taken else label,
            runs=tuple((block, len(list(run))) for block, run in groupby(blocks)),
            hidden=1,
            positions=1,
            frozen=frozen,
        )
        towers.append(tower)
    left = _count(fake_module.parameters()) - sum(tower.parameters for tower in towers)
    towers[-1] = replace(towers[-1], extras=left)
    return Outline(name=type(fake_module).__name__, towers=tuple(towers))


def _fake_copy(tensor: Tensor) -> Tensor:
    """Return a fake tensor of the same shape; call it inside FakeTensorMode."""
    hollow = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(hollow, requires_grad=tensor.requires_grad)
    return hollow.requires_grad_(tensor.requires_grad)


def _blocks(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are one block each: entries of the outermost repeated lists, and modules beside them."""
    children = [
        (f"{path}.{name}".strip("."), child) for name, child in module.named_children() if _count(child.parameters())
    ]
    if not any(isinstance(each, LISTS) and len(each) > 1 for each in module.modules()):
        yield path, module
        return
    kinds = Counter(type(child) for _, child in children) if isinstance(module, LISTS) else Counter()
    for name, child in children:
        if kinds[type(child)] > 1 and not isinstance(child, LISTS):
            yield name, child
        else:
            yield from _blocks(name, child)


def _flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float:
    """Return the FLOPs of one operation, counted by torch; a causal mask halves those of attention."""
    packet = getattr(func, "_overloadpacket", func)
    attention = packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    known: Callable[..., int] | None = flop_registry.get(
        torch.ops.aten._scaled_dot_product_flash_attention if attention else packet
    )
    if known is None:
        return 0.0
    if attention:
        causal = kwargs.get("is_causal", args[4] if len(args) > 4 else False)
        return known(*args[:3], out_val=out) / (2 if causal else 1)
    return float(known(*args, **kwargs, out_val=out))


def _seen_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storage; an expanded tensor has less storage than elements."""
    return sum(min(each.numel() * each.element_size(), each.untyped_storage().nbytes()) for each in tensors)


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_flatten(tree)[0] if isinstance(each, Tensor)]


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(each.numel() for each in {id(each): each for each in parameters}.values())
