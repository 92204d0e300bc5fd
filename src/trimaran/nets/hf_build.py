"""A Hugging Face model without memory, which gets this rank's part of its weights after a plan has split it."""

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.core import UserError
from trimaran.models import model_folder, weight_files
from trimaran.nets.hf import blocks_of, hf_config, hf_model, load_hf_model
from trimaran.nets.hf_read import WeightSlice, pieces_on_disk, read_pieces
from trimaran.nets.local_shards import local_part, local_slices

Fill = Callable[[nn.Module, torch.device], None]

log = logging.getLogger(__name__)


def open_hf_model(path: Path, *, trust_remote_code: bool, seed: int) -> tuple[nn.Module, Fill]:
    """Return the model in the folder, and what gives it fp32 weights on a device once it is split.

    No rank then holds more of it than its own part and one block. Weights are those on disk, or, beside a lone config,
    random ones that depend on `seed` and their names only. What cannot be built so is read whole; the log says why.
    """
    folder = model_folder(str(path))
    has_weights = bool(weight_files(folder))
    config = hf_config(path, trust_remote_code=trust_remote_code)
    module, pieces, flaw = _hollow(config, folder if has_weights else None, trust_remote_code)
    if flaw:
        log.warning("every rank reads the whole of %s before it is split: %s", path, flaw)
        return load_hf_model(path, trust_remote_code=trust_remote_code, seed=seed), _give_memory
    if has_weights:
        module.eval()  # as transformers leaves a model that it has loaded
        return module, lambda split, device: _read(split, device, folder, pieces)
    sketch = deepcopy(module)
    return module, lambda split, device: _draw_all(split, device, sketch, seed)


def _hollow(config: Any, folder: Path | None, trust_remote_code: bool) -> tuple[Any, list[WeightSlice], str]:
    """Return the model without memory, where its weights are on disk, and why that would not do, if it would not."""
    if getattr(config, "quantization_config", None):
        return None, [], "its weights are quantized"
    try:
        with _parameters_without_memory():
            module = hf_model(config, trust_remote_code=trust_remote_code)
        pieces, flaw = pieces_on_disk(module, folder) if folder else ([], "")
    except UserError:
        raise
    except Exception as error:  # whatever transformers, or code that comes with the model, cannot do without memory
        return None, [], f"{type(error).__name__}: {error}"
    return module, pieces, flaw


def _read(module: nn.Module, device: torch.device, folder: Path, pieces: list[WeightSlice]) -> None:
    _give_memory(module, device)
    read_pieces(module, folder, pieces)


def _draw_all(module: nn.Module, device: torch.device, sketch: nn.Module, seed: int) -> None:
    """Fill a split module with random weights, a block at a time, as the model's own code draws them."""
    _give_memory(module, device)
    homes = dict(module.named_parameters())
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for name, unit, deep in _units(sketch):
            mine = [each for each, _ in unit.named_parameters(prefix=name, recurse=deep) if each in homes]
            if not mine:
                continue  # tied to what another unit draws
            unit._apply(_as_nan, recurse=deep)
            _draw(sketch, list(unit.named_modules(prefix=name)) if deep else [(name, unit)], seed)
            for each in mine:
                drawn = sketch.get_parameter(each)
                _refuse_undrawn(each, drawn)
                local_part(homes[each]).copy_(drawn[local_slices(homes[each])])
            unit._apply(_without_memory, recurse=deep)


def _draw(sketch: nn.Module, parts: list[tuple[str, nn.Module]], seed: int) -> None:
    """Fill one unit on the CPU. The parts come before the whole, which may draw some of theirs anew."""
    for path, part in reversed(parts):
        digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)  # that of the CPU alone
        _owner(sketch, path)._init_weights(part)


def _refuse_undrawn(name: str, drawn: Tensor) -> None:
    if drawn.isnan().any():
        raise UserError("M029", f"the model does not say how its weights start: {name}", where="model.path",
                        fix="save the model with its weights, and name that folder")  # fmt: skip


def _owner(sketch: nn.Module, path: str) -> Any:
    """Return the innermost model around a module; a model made of several lets each draw its own."""
    owner: nn.Module = sketch
    for depth in range(path.count(".") + 1 if path else 0):
        around = sketch.get_submodule(".".join(path.split(".")[: depth + 1]))
        owner = around if hasattr(around, "_init_weights") else owner
    return owner


def _units(module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield the blocks, and alone every other module that has parameters, with its name and whether it is a block."""
    blocks = set(blocks_of(module))
    inside = {part for block in blocks for part in block.modules()} - blocks
    for name, part in module.named_modules():
        if part in blocks or (part not in inside and any(True for _ in part.parameters(recurse=False))):
            yield name, part, part in blocks


def _as_nan(each: Tensor) -> Tensor:
    return torch.full_like(each, torch.nan, device="cpu") if each.is_meta else each


def _without_memory(each: Tensor) -> Tensor:
    return each.to("meta") if isinstance(each, nn.Parameter) else each


def _give_memory(module: nn.Module, device: torch.device) -> None:
    """Move the module from the host to the device; what had no memory gets some there. Tied weights stay tied.

    What a plan has put on a device stays: with parameters offloaded, that is the buffers.
    """
    names: dict[int, str] = {}
    pairs = [(name, names.setdefault(id(each), name)) for name, each in module.named_parameters(remove_duplicate=False)]

    def moved(each: Tensor) -> Tensor:
        if each.device.type == "meta":
            return torch.empty_like(each, device=device)
        return each.to(device) if each.device.type == "cpu" else each

    module._apply(moved)
    for name, first in pairs:
        owner, _, leaf = name.rpartition(".")
        if name != first:
            setattr(module.get_submodule(owner), leaf, module.get_parameter(first))


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Let modules be built whose parameters are on the meta device, and whose buffers have their values.

    `torch.device("meta")` would take the buffers as well, and nobody but the constructor can fill in all of them.
    """
    register = nn.Module.register_parameter

    def without_memory(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = without_memory
    try:
        yield
    finally:
        nn.Module.register_parameter = register
