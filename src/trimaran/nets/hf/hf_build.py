"""Builds a Hugging Face model on the meta device, and fills this rank's shard of its weights after sharding."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # private in torch; there is no other way to see operators

from trimaran.core import UserError
from trimaran.models import model_folder, weight_files
from trimaran.nets.hf.hf import auto_class, blocks_of, hf_config, hf_model, load_hf_model
from trimaran.nets.hf.hf_kinds import refuse_other_kind, refuse_without_head
from trimaran.nets.hf.hf_read import WeightSource, find_weight_sources, keep_conversions, read_weights
from trimaran.nets.local_shards import local_part, local_slices
from trimaran.nets.network import WeightsNeededError
from trimaran.nets.nf4_linear import loadable_weights, weight_to_fill

FillWeights = Callable[[nn.Module, torch.device], None]

log = logging.getLogger(__name__)


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
    module, sources, problem = _build_on_meta(config, folder if has_weights else None, trust_remote_code)
    if problem and without_weights:
        raise WeightsNeededError(problem)
    if problem:
        log.warning("every rank loads the full model %s before it is sharded: %s", path, problem)
        return load_hf_model(path, trust_remote_code=trust_remote_code, seed=seed), materialise
    if has_weights:
        module.eval()  # as transformers returns a loaded model
        return module, lambda sharded, device: _read(sharded, device, folder, sources, report_progress)
    keep_conversions(module)
    unsharded = deepcopy(module)
    return module, lambda sharded, device: _initialise_all(sharded, device, unsharded, seed)


def _build_on_meta(config: Any, folder: Path | None, trust_remote_code: bool) -> tuple[Any, list[WeightSource], str]:
    """Return the model on the meta device, where its weights are on disk, and why this does not work (or empty)."""
    if getattr(config, "quantization_config", None):
        return None, [], "its weights are quantized"
    try:
        with _parameters_on_meta():
            module = hf_model(config, trust_remote_code=trust_remote_code)
        sources, problem = find_weight_sources(module, folder) if folder else ([], "")
        if folder:
            refuse_without_head(module, [each.target for each in sources], problem, folder)
    except UserError:
        raise
    except Exception as error:  # any error of transformers or of the model's own code
        return None, [], f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return module, sources, problem


def _read(
    module: nn.Module,
    device: torch.device,
    folder: Path,
    sources: list[WeightSource],
    report_progress: Callable[[], None],
) -> None:
    materialise(module, device)
    if device.type != "meta":  # where it is only checked, and `find_weight_sources` has done that
        read_weights(module, folder, sources, report_progress)


def _initialise_all(module: nn.Module, device: torch.device, unsharded: nn.Module, seed: int) -> None:
    """Fill a sharded module with random weights from the model's own initialisation, one block at a time.

    On the meta device, only check that it initialises every weight.
    """
    materialise(module, device)
    targets = loadable_weights(module)
    if device.type == "meta":
        _check_initialisation(unsharded, targets)
        return
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for name, unit, is_block in _units(unsharded):
            names = [each for each, _ in unit.named_parameters(prefix=name, recurse=is_block) if each in targets]
            if not names:
                continue  # tied to parameters of another unit
            unit._apply(_to_cpu_nan, recurse=is_block)
            _initialise(unsharded, list(unit.named_modules(prefix=name)) if is_block else [(name, unit)], seed)
            for each in names:
                value = unsharded.get_parameter(each)
                _refuse_uninitialised(each, value)
                with weight_to_fill(module, each, targets[each]) as target:
                    local_part(target).copy_(value[local_slices(target)])
            unit._apply(_to_meta, recurse=is_block)


def _initialise(unsharded: nn.Module, parts: list[tuple[str, nn.Module]], seed: int) -> None:
    """Initialise one unit on the CPU. Children come first, because a parent may initialise some of them again."""
    for path, part in reversed(parts):
        digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)  # of the CPU only
        _owner(unsharded, path)._init_weights(part)


def _refuse_uninitialised(name: str, value: Tensor) -> None:
    if value.isnan().any():
        raise _uninitialised(name)


def _uninitialised(name: str) -> UserError:
    return UserError("M029", f"the model's code does not initialise {name}", where="model.path",
                     fix="save the model with its weights, and name that folder")  # fmt: skip


def _check_initialisation(unsharded: nn.Module, names: Iterable[str]) -> None:
    """Raise if the model's initialisation leaves out a weight. Nothing is computed; what it writes to is recorded."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), WrittenStorages() as written:
        try:
            _initialise(unsharded, list(unsharded.named_modules()), seed=0)
        except Exception as error:  # any error of the model's own code, which may read values
            log.info("the initialisation does not run on the meta device: %s: %s", type(error).__name__, error)
            return
    for name in names:
        if unsharded.get_parameter(name).untyped_storage()._cdata not in written.storages:
            raise _uninitialised(name)


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


def _owner(unsharded: nn.Module, path: str) -> Any:
    """Return the innermost model around a module; in a model of several models each initialises its own modules."""
    owner: nn.Module = unsharded
    for depth in range(path.count(".") + 1 if path else 0):
        around = unsharded.get_submodule(".".join(path.split(".")[: depth + 1]))
        owner = around if hasattr(around, "_init_weights") else owner
    return owner


def _units(module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield each block and each other module with its own parameters: its name, the module, whether it is a block."""
    blocks = set(blocks_of(module))
    inside = {part for block in blocks for part in block.modules()} - blocks
    for name, part in module.named_modules():
        if part in blocks or (part not in inside and any(True for _ in part.parameters(recurse=False))):
            yield name, part, part in blocks


def _to_cpu_nan(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, torch.nan, device="cpu") if tensor.is_meta else tensor


def _to_meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta") if isinstance(tensor, nn.Parameter) else tensor


def materialise(module: nn.Module, device: torch.device) -> None:
    """Move host tensors to the device, and allocate meta tensors there. Tied weights stay tied.

    Tensors that a plan has already put on a device stay there: with offloaded parameters, the buffers.
    """
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
    """Build modules with parameters on the meta device and real buffers.

    `torch.device("meta")` would affect the buffers too, and only the constructor can compute all of them.
    """
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
