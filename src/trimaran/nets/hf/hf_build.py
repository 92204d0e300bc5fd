"""Builds a Hugging Face model on the meta device, and fills this rank's shard of its weights after sharding."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # private in torch; there is no other way to see operators

from trimaran.core import UserError
from trimaran.models import model_folder, weight_files
from trimaran.nets.hf.hf import auto_class, blocks_of, hf_config, hf_model, load_hf_model
from trimaran.nets.hf.hf_attention import first_line
from trimaran.nets.hf.hf_kinds import refuse_other_kind, refuse_without_head
from trimaran.nets.hf_weights import open_sources, open_weights
from trimaran.nets.local_shards import local_part, local_slices
from trimaran.nets.network import WeightsNeededError
from trimaran.nets.nf4_linear import loadable_weights, weight_to_fill

FillWeights = Callable[[nn.Module, torch.device], None]
log = logging.getLogger(__name__)


try:
    from transformers import conversion_mapping, core_model_loading
except ImportError:  # transformers before 5 keeps weights in memory as they are on disk
    conversion_mapping = core_model_loading = None


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The tensors on disk, with the converter's patterns, that become `target`: one, or several that are fused."""

    target: str
    tensors: tuple[tuple[str, str], ...]
    converter: Any = None

    @property
    def name(self) -> str:
        """The single name on disk; of several names for the same tensor the last, as in transformers."""
        return self.tensors[-1][0]

    def convert(self, module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the converted tensors, given `values` by name on disk; there may be more than the target."""
        converter = deepcopy(self.converter)  # it keeps its inputs
        for name, pattern in self.tensors:
            converter.add_tensor(self.target, name, pattern, values[name])
        result = converter.convert(self.target, model=module, config=module.config)
        by_target = result[0] if isinstance(result, tuple) else result  # the first 5.x also return errors
        for target, tensor in by_target.items():
            yield target, tensor[0] if isinstance(tensor, list) else tensor


def find_weight_sources(module: Any, folder: Path) -> tuple[list[WeightSource], str]:
    """Return where the weights of a meta-device module are on disk, and why that is not clear (empty if it is)."""
    wanted = module.state_dict()
    with ExitStack() as stack:
        files = open_weights(folder, stack)
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}
    sources = _weight_sources(module, wanted, list(shapes))
    found: dict[str, tuple[int, ...]] = {}
    for source in sources:
        if source.converter is None:
            found[source.target] = shapes[source.name]
        else:
            values = {name: torch.empty(shapes[name], device="meta") for name, _ in source.tensors}
            found |= {name: tuple(each.shape) for name, each in source.convert(module, values)}
    return sources, _mismatch(module, {name: tuple(each.shape) for name, each in wanted.items()}, found)


def read_weights(
    module: nn.Module, folder: Path, sources: list[WeightSource], report_progress: Callable[[], None] = lambda: None
) -> None:
    """Fill the module with this rank's slices. Fused tensors are briefly unsharded; a report follows each source."""
    targets = dict(module.named_buffers()) | loadable_weights(module, remove_duplicate=False)
    with open_sources(folder) as files:
        for source in [each for each in sources if each.target in targets]:
            if source.converter is None:
                _copy(module, source.target, targets, files[source.name].get_slice(source.name))
            else:
                values = {name: files[name].get_tensor(name) for name, _ in source.tensors}
                for target, tensor in source.convert(module, values):
                    if target in targets:
                        _copy(module, target, targets, tensor)
            report_progress()


def _copy(module: nn.Module, name: str, targets: Mapping[str, Tensor], value: Any) -> None:
    with weight_to_fill(module, name, targets[name]) as target:
        local = local_part(target)
        if local.numel():
            local.copy_(value[local_slices(target) or ...])  # a scalar has no slices


def _weight_sources(module: Any, wanted: dict[str, Tensor], on_disk: list[str]) -> list[WeightSource]:
    """Return the sources of all targets, with names mapped, prefixed and fused as transformers does it."""
    prefix = module.base_model_prefix
    if conversion_mapping is None or core_model_loading is None:
        targets: dict[str, str] = {}
        for name in on_disk:  # a tensor may have been saved with or without the base model's prefix
            names = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
            targets[next((each for each in names if each in wanted), name)] = name
        return [WeightSource(target, ((name, name),)) for target, name in targets.items() if target in wanted]
    conversions = conversion_mapping.get_model_conversion_mapping(module)
    renamings = [each for each in conversions if isinstance(each, core_model_loading.WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, core_model_loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    tensors: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(on_disk, key=core_model_loading.dot_natural_key):  # experts in the order of their numbers
        target, pattern = core_model_loading.rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = name, None
        if target in wanted:
            tensors.setdefault(target, []).append((name, pattern or name))
    if all(hasattr(each, "was_used") for each in conversions):  # for saving; the first 5.x do not need it
        module._weight_conversions = [each for each in conversions if each.was_used()]
    return [WeightSource(target, tuple(names), by_pattern.get(names[0][1])) for target, names in tensors.items()]


def _mismatch(module: nn.Module, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str:
    """Return the first weight that is missing, present twice or of another shape; empty if there is none."""
    owners: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    tied = {name: names for names in owners.values() for name in names}
    for name, shape in wanted.items():
        present = [each for each in tied.get(name, [name]) if each in found]
        if len(present) != 1:
            return f"{name} is {'not' if not present else 'twice'} on disk"
        if found[present[0]] != shape:
            return f"{name} has another shape on disk"
    return ""


def open_hf_model(
    path: Path,
    *,
    trust_remote_code: bool,
    seed: int,
    report_progress: Callable[[], None] = lambda: None,
    without_weights: bool = False,
) -> tuple[nn.Module, FillWeights]:
    """Return the model in the folder, and a function that gives it fp32 weights on a device after it is sharded.

    A rank never holds more than its own shard and one block. The weights are those on disk; if the folder holds only a
    config, they are random and depend only on `seed` and their names. A model that cannot be built this way is loaded
    unsharded, and the log says why; `without_weights` raises WeightsNeededError instead. `report_progress` is called
    after each tensor that the function reads.
    """
    folder = model_folder(str(path))
    has_weights = bool(weight_files(folder))
    config = hf_config(path, trust_remote_code=trust_remote_code)
    refuse_other_kind(config, auto_class(config), path)
    module: Any = None
    sources, problem = list[WeightSource](), ""
    if getattr(config, "quantization_config", None):
        problem = "its weights are quantized"
    else:
        try:
            with _parameters_on_meta():
                module = hf_model(config, trust_remote_code=trust_remote_code)
            if has_weights:
                sources, problem = find_weight_sources(module, folder)
                refuse_without_head(module, [each.target for each in sources], problem, folder)
        except UserError:
            raise
        except Exception as error:  # any error of transformers or of the model's own code
            problem = first_line(error)
    if problem and without_weights:
        raise WeightsNeededError(problem)
    if problem:
        log.warning("every rank loads the full model %s before it is sharded: %s", path, problem)
        return load_hf_model(path, trust_remote_code=trust_remote_code, seed=seed), materialise
    if has_weights:
        module.eval()  # as transformers returns a loaded model

        def read(sharded: nn.Module, device: torch.device) -> None:
            materialise(sharded, device)
            if device.type != "meta":  # where it is only checked, and `find_weight_sources` has done that
                read_weights(sharded, folder, sources, report_progress)

        return module, read
    if conversion_mapping is not None and core_model_loading is not None and not hasattr(module, "_weight_conversions"):
        # Keep how transformers renames and splits the weights: it asks by a class name, which a plan changes.
        find: Any = conversion_mapping.get_model_conversion_mapping
        conversions = find(module, **({"add_legacy": False} if "add_legacy" in signature(find).parameters else {}))
        prefix_change = getattr(core_model_loading, "PrefixChange", ())  # tells only how a folder was read
        if conversions := [each for each in conversions if not isinstance(each, prefix_change)]:
            module._weight_conversions = conversions
    unsharded = deepcopy(module)
    return module, lambda sharded, device: _initialise_all(sharded, device, unsharded, seed)


def _initialise_all(module: nn.Module, device: torch.device, unsharded: nn.Module, seed: int) -> None:
    """Fill a sharded module from the model's own initialisation, block by block; on the meta device only check it."""
    materialise(module, device)
    targets = loadable_weights(module)
    if device.type == "meta":  # nothing is computed; what the initialisation writes to is recorded
        with torch.no_grad(), torch.random.fork_rng(devices=[]), WrittenStorages() as written:
            try:
                _initialise(unsharded, list(unsharded.named_modules()), seed=0)
            except Exception as error:  # any error of the model's own code, which may read values
                log.info("the initialisation does not run on the meta device: %s: %s", type(error).__name__, error)
                return
        for name in targets:
            if unsharded.get_parameter(name).untyped_storage()._cdata not in written.storages:
                raise _uninitialised(name)
        return
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for name, unit, is_block in _units(unsharded):
            names = [each for each, _ in unit.named_parameters(prefix=name, recurse=is_block) if each in targets]
            if not names:
                continue  # tied to parameters of another unit
            # NaN shows what the model's code leaves out.
            unit._apply(lambda each: torch.full_like(each, torch.nan, device="cpu") if each.is_meta else each,
                        recurse=is_block)  # fmt: skip
            _initialise(unsharded, list(unit.named_modules(prefix=name)) if is_block else [(name, unit)], seed)
            for each in names:
                value = unsharded.get_parameter(each)
                if value.isnan().any():
                    raise _uninitialised(each)
                with weight_to_fill(module, each, targets[each]) as target:
                    local_part(target).copy_(value[local_slices(target)])
            unit._apply(lambda each: each.to("meta") if isinstance(each, nn.Parameter) else each, recurse=is_block)


def _initialise(unsharded: nn.Module, parts: list[tuple[str, nn.Module]], seed: int) -> None:
    """Initialise one unit on the CPU. Children come first, because a parent may initialise some of them again."""
    for path, part in reversed(parts):
        digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)  # of the CPU only
        # The innermost model around a module; in a model of several models each initialises its own modules.
        owner = unsharded
        for depth in range(path.count(".") + 1 if path else 0):
            around = unsharded.get_submodule(".".join(path.split(".")[: depth + 1]))
            owner = around if hasattr(around, "_init_weights") else owner
        owner._init_weights(part)  # pyrefly: ignore[not-callable]


def _uninitialised(name: str) -> UserError:
    return UserError("M029.model-code", where="model.path", name=name)


class WrittenStorages(TorchDispatchMode):
    """Records the storages that operators write to in place, by address."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                self.storages.add(value.untyped_storage()._cdata)
        return func(*args, **(kwargs or {}))


def _units(module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield each block and each other module with its own parameters: its name, the module, whether it is a block."""
    blocks = set(blocks_of(module))
    inside = {part for block in blocks for part in block.modules()} - blocks
    for name, part in module.named_modules():
        if part in blocks or (part not in inside and any(True for _ in part.parameters(recurse=False))):
            yield name, part, part in blocks


def materialise(module: nn.Module, device: torch.device) -> None:
    """Move host tensors to the device, and allocate meta tensors there. Others stay; tied weights stay tied."""
    names: dict[int, str] = {}
    pairs = [(name, names.setdefault(id(each), name)) for name, each in module.named_parameters(remove_duplicate=False)]

    def moved(tensor: Tensor) -> Tensor:
        if tensor.device.type == "meta":
            return torch.empty_like(tensor, device=device)
        return tensor.to(device) if tensor.is_cpu else tensor

    module._apply(moved)
    for name, first in pairs:
        owner, _, leaf = name.rpartition(".")
        if name != first:
            setattr(module.get_submodule(owner), leaf, module.get_parameter(first))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Build modules with parameters on the meta device, but real buffers, which only the constructor can compute."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
