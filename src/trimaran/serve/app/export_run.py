"""Writes an export of a checkpoint, reads it again and compares it with the checkpoint. Imports torch."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from trimaran.checkpoint.convert.convert import export_dcp, export_hf, not_written, read_full_tensor, refuse_occupied
from trimaran.checkpoint.convert.convert_adapter import export_adapter, export_merged
from trimaran.checkpoint.convert.dcp_read import DcpSource
from trimaran.checkpoint.convert.dcp_write import dcp_key
from trimaran.checkpoint.convert.export_hf import write_folder
from trimaran.checkpoint.disk_source import DiskSource
from trimaran.checkpoint.step_dirs import step_of
from trimaran.checkpoint.verify_checkpoint import refuse_damaged_weights
from trimaran.core import Recipe, UserError
from trimaran.data import TokenShards
from trimaran.data.text.prepare_text import cache_folder
from trimaran.data.text.tokenizer import Tokenizer, load_tokenizer
from trimaran.serve.app.export_request import ExportRequest
from trimaran.serve.app.model_card import write_model_card
from trimaran.serve.exports.compare_logits import (
    Logits,
    LogitsDifference,
    compare_logits,
    network_logits,
    refuse_difference,
    sample_tokens,
)
from trimaran.serve.exports.gguf_export import FILE, check_rope_factors, gguf_spec, read_gguf, with_rope, write_gguf
from trimaran.serve.exports.graph_exports import (
    ONNX,
    PROGRAM,
    graph_module,
    read_onnx,
    read_program,
    write_onnx,
    write_program,
)
from trimaran.serve.exports.torchao_weights import hf_logits, quantise_hf_folder, quantise_linears
from trimaran.serve.open_weights import open_trained
from trimaran.serve.trained_model import TrainedModel, stored_dtype
from trimaran.serve.weights_location import TrainedWeights
from trimaran.train.generation.generate import TOKENIZER, open_saved_tokenizer, save_tokenizer

Progress = Callable[[str, float], None]


def export_step(request: ExportRequest, path: Path, target: Path, progress: Progress) -> dict[str, Any]:
    """Write the checkpoint in `path` to the new folder `target`. Return what is known of the export.

    With `request.check` the folder is read again and compared with the checkpoint; a folder that differs is an error.
    """
    refuse_occupied(target)
    refuse_damaged_weights(path)
    write = {"dcp": _write_dcp, "hf": _write_hf, "merged": _write_hf, "adapter": _write_hf}.get(
        request.form, _write_file
    )
    return write(request, path, target, progress)


def _write_dcp(request: ExportRequest, path: Path, target: Path, progress: Progress) -> dict[str, Any]:
    source = DiskSource(path)
    keys = export_dcp(source, request.run.read_recipe().model, target, progress=progress)
    if not request.check:
        return {}
    written = DcpSource(target)
    for number, (exported, key) in enumerate(keys.items(), 1):
        if not torch.equal(_bits(read_full_tensor(source, key)), _bits(read_full_tensor(written, dcp_key(exported)))):
            raise UserError("K072", f"the export differs from the checkpoint in {key}", where=str(target),
                            fix="do not use it, and check the disk")  # fmt: skip
        progress("comparing the tensors", number / len(keys))
    return {"check": {"tensors": len(keys), "largest_difference": 0.0}}


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor: NaN differs from itself."""
    return tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8)


def _write_hf(request: ExportRequest, path: Path, target: Path, progress: Progress) -> dict[str, Any]:
    recipe = request.run.read_recipe()
    add_files = partial(_add_files, request, path, tokenizer_of(request.run, recipe))
    width = request.quantise
    if width not in ("int8", "int4"):
        _write_weights(request, recipe, path, target, add_files, progress)
    else:
        with TemporaryDirectory(dir=_parent(target), prefix=".trimaran-export-") as scratch:
            _write_weights(request, recipe, path, Path(scratch) / "plain", lambda folder: None, progress)
            progress("quantising", 0.5)
            quantise_hf_folder(Path(scratch) / "plain", Path(scratch) / "quantised", width)
            write_folder(target, lambda draft: _copy_folder(Path(scratch) / "quantised", draft, add_files))
    if not request.check or not recipe.model.kind.in_transformers or recipe.model.trust_remote_code:
        return {}
    trained = _open(request, path)
    return {"check": _compare(request, trained, _hf_reader(request, target), target, progress).as_dict()}


def _copy_folder(source: Path, draft: Path, add_files: Callable[[Path], None]) -> None:
    for file in source.iterdir():
        shutil.copyfile(file, draft / file.name)
    add_files(draft)


def _parent(target: Path) -> Path:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise not_written(target, error) from None
    return target.parent


def _write_weights(
    request: ExportRequest,
    recipe: Recipe,
    path: Path,
    target: Path,
    add_files: Callable[[Path], None],
    progress: Progress,
) -> None:
    """Write a Hugging Face or PEFT folder, one tensor at a time."""
    source, dtype = DiskSource(path), request.dtype
    if request.form == "hf":
        export_hf(source, recipe.model, target, dtype=dtype or "fp32", add_files=add_files, progress=progress)
    elif request.form == "adapter":
        export_adapter(source, recipe.model, target, dtype=dtype or "fp32", add_files=add_files, progress=progress)
    else:
        refuse_other_base_of(recipe, source.progress.get("base") or {}, progress)
        seed = recipe.train.seed
        export_merged(source, recipe.model, target, seed=seed, dtype=dtype, add_files=add_files, progress=progress)


def _write_file(request: ExportRequest, path: Path, target: Path, progress: Progress) -> dict[str, Any]:
    """Write a folder with one model file: GGUF, ONNX or an archive of torch.export."""
    trained = _open(request, path)
    facts: dict[str, Any] = {}

    def fill(draft: Path) -> None:
        network = trained.network
        if request.form == "gguf":
            name, kind = request.run.read_recipe().name, request.precision
            left_out = write_gguf(network, trained.tokenizer, draft / FILE, name=name, kind=kind, progress=progress)
            facts.update({"tokenizer_left_out": left_out} if left_out else {})
        else:
            _write_graph(request, trained, draft)
        _add_files(request, path, None if request.form == "gguf" else trained.tokenizer, draft)

    try:
        write_folder(target, fill)
    except OSError as error:
        raise not_written(target, error) from None
    if request.check:
        read = {"gguf": _gguf_reader, "onnx": _onnx_reader, "torch-export": _program_reader}[request.form]
        facts["check"] = _compare(request, trained, read(target, trained), target, progress).as_dict()
    return facts


def _write_graph(request: ExportRequest, trained: TrainedModel, draft: Path) -> None:
    network = trained.network
    module = graph_module(network, f"--to {request.form}")
    if request.quantise in ("int8", "int4"):
        quantise_linears(module, request.quantise)
    write = write_onnx if request.form == "onnx" else write_program
    write(module, draft / (ONNX if request.form == "onnx" else PROGRAM), max_seq_len=network.max_seq_len)


def _gguf_reader(target: Path, trained: TrainedModel) -> Logits:
    spec = gguf_spec(trained.network)
    check_rope_factors(target / FILE, spec)
    return network_logits(with_rope(read_gguf(target / FILE), spec.block.rope))


def _onnx_reader(target: Path, trained: TrainedModel) -> Logits:
    return read_onnx(target / ONNX)


def _program_reader(target: Path, trained: TrainedModel) -> Logits:
    return read_program(target / PROGRAM)


def _hf_reader(request: ExportRequest, target: Path) -> Logits:
    """Return how a Hugging Face folder is read: by transformers, if it knows the model and is installed."""
    recipe = request.run.read_recipe()
    if request.form != "adapter" and recipe.model.kind.reads != "images" and (logits := hf_logits(target)) is not None:
        return logits
    return network_logits(open_trained(TrainedWeights(path=target), "fp32", cache=None).network)


def _compare(
    request: ExportRequest, trained: TrainedModel, exported: Logits, target: Path, progress: Progress
) -> LogitsDifference:
    progress("comparing the logits", 0.5)
    network, precision = trained.network, request.precision
    if request.form == "merged" and request.dtype is None and request.quantise is None:
        precision = stored_dtype(target)  # that of the base
    batches = sample_tokens(network.vocabulary, network.max_seq_len)
    if trained.rules is not None:  # an image token needs an image
        batches = [tokens.masked_fill(tokens == trained.rules.image_token, 0) for tokens in batches]
    difference = compare_logits(network_logits(network), exported, batches, precision=precision)
    refuse_difference(difference, str(target))
    return difference


def _open(request: ExportRequest, path: Path) -> TrainedModel:
    return open_trained(
        TrainedWeights(path=path, run=request.run, step=step_of(path)), "fp32", cache=cache_folder(os.environ)
    )


def _add_files(request: ExportRequest, path: Path, tokenizer: Tokenizer | None, folder: Path) -> None:
    """Add the tokenizer and the model card to the folder of an export."""
    save_tokenizer(tokenizer, folder)
    write_model_card(request, DiskSource(path).manifest, folder)


def refuse_other_base_of(recipe: Recipe, saved: dict[str, Any], progress: Progress) -> None:
    """Raise UserError if the base of an adapter is not the one it was trained on."""
    from trimaran.serve.adapted_network import refuse_other_base

    refuse_other_base(recipe.model, saved, seed=recipe.train.seed, cache=cache_folder(os.environ),
                      report_progress=lambda fraction: progress("hashing the base", fraction))  # fmt: skip


def tokenizer_of(run: Any, recipe: Recipe) -> Tokenizer | None:
    """Return the run's tokenizer: that of its saved weights, or that of its data."""
    if (run.model / TOKENIZER).is_file():
        return open_saved_tokenizer(run.model)
    if recipe.data.source == "shards" and recipe.data.path:
        return TokenShards.open(Path(recipe.data.path)).tokenizer
    return load_tokenizer(recipe.data.tokenizer)
