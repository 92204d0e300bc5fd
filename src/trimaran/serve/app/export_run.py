"""Writes an export of a checkpoint with its model card, reads it again and compares it. Imports torch."""

import json
import os
import platform
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from torch import Tensor

from trimaran.app import RunState
from trimaran.checkpoint import (
    DcpSource,
    DiskSource,
    Manifest,
    dcp_key,
    export_adapter,
    export_dcp,
    export_hf,
    export_merged,
    read_full_tensor,
    refuse_damaged_weights,
    refuse_occupied,
    reporting_errors,
    step_of,
    write_folder,
)
from trimaran.core import VERSION, Recipe, UserError, show_count, show_seconds
from trimaran.data import Tokenizer, cache_folder
from trimaran.models import model_text
from trimaran.runs import read_evaluations
from trimaran.serve.app.export import ExportRequest
from trimaran.serve.exports.compare_logits import (
    compare_logits,
    network_logits,
    refuse_difference,
    sample_tokens,
)
from trimaran.serve.exports.gguf import FILE, gguf_spec, read_gguf, write_gguf
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
from trimaran.serve.settings import TrainedWeights
from trimaran.serve.trained_model import TrainedModel, open_trained, refuse_other_base, stored_dtype, tokenizer_of
from trimaran.train import save_tokenizer

CARD = "README.md"
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
LIBRARY_NAMES = {"adapter": "peft", "gguf": "gguf", "onnx": "onnx", "torch-export": "torch"}
LOAD = {
    "hf": """from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{folder}")""",
    "adapter": """from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("{folder}")""",
    "gguf": """from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{folder}", gguf_file="model.gguf")""",
    "onnx": """import onnxruntime

session = onnxruntime.InferenceSession("{folder}/model.onnx")
(logits,) = session.run(["logits"], {{"input_ids": ids}})  # ids: int64 [batch, sequence]""",
    "torch-export": """import torch

program = torch.export.load("{folder}/model.pt2").module()
logits = program(ids)  # ids: int64 [batch, sequence]""",
}
SERVED = ("hf", "merged", "adapter")
Progress = Callable[[str, float], None]


def model_card(request: ExportRequest, manifest: Manifest, folder: str) -> str:
    """Return the text of the card, made of the files of the run. What is not known is left out."""
    folder = folder.removeprefix(".").removesuffix(".draft")
    state = RunState(request.run)
    state.refresh()
    plan = state.plan.model_dump(mode="json", exclude_defaults=True, exclude={"prediction"})
    versions = {"trimaran": VERSION, "Python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    usage = ["```python", LOAD.get(request.form, LOAD["hf"]).format(folder=folder), "```"]
    if request.form in SERVED:
        usage += ["", "```sh", f"trimaran serve {folder}", f'trimaran generate {folder} --prompt "Hello"', "```"]
    elif request.form == "gguf":
        usage += ["", "```sh", f"llama-server -m {folder}/model.gguf", "```"]
    if request.quantise:
        usage += ["", f"The weights of linear layers are quantised: {request.precision}."]
    sections = (
        ("Training", _card_training(state, manifest)),
        ("Evaluation", _card_evaluation(state, manifest)),
        ("Load it", usage),
        ("Versions", [f"{name} {number}" for name, number in versions.items()]),
        ("Plan", [f"`{state.plan}`", "", "```json", json.dumps(plan, indent=2), "```"]),
        ("Recipe", ["```yaml", state.run.recipe.read_text(encoding="utf-8").rstrip(), "```"]),
    )
    tree: dict[str, Any] = {"library_name": LIBRARY_NAMES.get(request.form, "transformers")}
    if tag := state.recipe.model.kind.pipeline_tag:
        tree["pipeline_tag"] = tag
    tree["tags"] = ["trimaran", *([state.recipe.model.adapter.kind] if state.recipe.model.adapter else [])]
    if state.recipe.model.path:
        tree["base_model"] = Path(state.recipe.model.path).name
    metrics = [
        {"type": name, "value": round(row[name], 6)}
        for row in _held_out(state, manifest)[-1:]
        for name in ("loss", "perplexity", "bits_per_byte")
        if isinstance(row.get(name), float)
    ]
    if metrics:
        data = {"name": f"held-out part of {state.recipe.data.source}", "type": state.recipe.data.source}
        result = {"task": {"type": "text-generation"}, "dataset": data, "metrics": metrics}
        tree["model-index"] = [{"name": state.recipe.name, "results": [result]}]
    front = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    lines = ["---", front.rstrip(), "---", "", f"# {state.recipe.name}", ""]
    model = model_text(state.recipe.model, state.recipe.data)
    lines += [f"{model}, trained with Trimaran; the checkpoint of step {manifest.step}."]
    for title, body in sections:
        if body:
            bullet = "- " if title in ("Training", "Evaluation", "Versions") else ""
            lines += ["", f"## {title}", "", *(f"{bullet}{line}" for line in body)]
    return "\n".join(lines) + "\n"


def _card_training(state: RunState, manifest: Manifest) -> list[str]:
    train, data, measured = state.recipe.train, state.recipe.data, state.measured
    lines = [f"{manifest.step} of {train.steps} steps, {train.global_batch} sequences each"]
    if state.unit == "tokens":
        lines[0] += (
            f" of at most {data.seq_len} tokens: {show_count(manifest.step * train.global_batch * data.seq_len)}"
        )
    losses = [step.loss for step in state.steps if step.step <= manifest.step]
    if losses:
        lines.append(f"training loss {state.first_loss:.4f} at the first step, {losses[-1]:.4f} at the last")
    lines.append(f"AdamW, learning rate {train.lr:g}, weight decay {train.optimizer.weight_decay:g}, seed {train.seed}")
    if measured is not None:
        lines.append(
            f"{show_count(measured.tokens_per_second)} {state.unit}/s, {show_seconds(measured.step_seconds)} a step"
        )
    mixture = ", ".join(each.name for each in data.mixture)
    lines.append(f"data: {mixture or data.source}{f' ({data.path})' if data.path else ''}")
    if digest := manifest.progress.get("data"):
        lines.append(f"SHA-256 of the data as it was read: `{digest}`")
    return lines


def _held_out(state: RunState, manifest: Manifest) -> list[dict[str, Any]]:
    own = [{"loss": float(loss), "data": "held-out"} for step, loss in state.evaluations if step == manifest.step]
    later = [row for row in read_evaluations(state.run) if row.get("step") == manifest.step]
    return own + [row for row in later if row.get("data") == "held-out"]


def _card_evaluation(state: RunState, manifest: Manifest) -> list[str]:
    lines = [_loss_line("held-out data", row) for row in _held_out(state, manifest)[-1:]]
    for row in read_evaluations(state.run):
        if row.get("step") != manifest.step:
            continue
        if row.get("data") not in (None, "held-out") and row.get("loss") is not None:
            lines.append(_loss_line(str(row["data"]), row))
        for task, metrics in (row.get("tasks") or {}).items():
            shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items() if isinstance(value, float))
            lines.append(f"{task}: {shown}")
    return lines


def _loss_line(data: str, row: dict[str, Any]) -> str:
    names = {"loss": "loss", "perplexity": "perplexity", "bits_per_byte": "bits per byte"}
    found = [f"{text} {row[name]:.4f}" for name, text in names.items() if isinstance(row.get(name), float)]
    count = f" ({show_count(row['tokens'])} tokens)" if isinstance(row.get("tokens"), int) else ""
    return f"{data}{count}: {', '.join(found)}"


def export_step(request: ExportRequest, path: Path, target: Path, progress: Progress) -> dict[str, Any]:
    """Write the checkpoint in `path` to the new folder `target`; compare them if asked (`check`). Return the facts."""
    refuse_occupied(target)
    refuse_damaged_weights(path)
    if request.form == "dcp":
        source = DiskSource(path)
        keys = export_dcp(source, request.run.read_recipe().model, target, progress=progress)
        if not request.check:
            return {}
        written = DcpSource(target)
        for number, (exported, key) in enumerate(keys.items(), 1):
            if not torch.equal(
                _bits(read_full_tensor(source, key)), _bits(read_full_tensor(written, dcp_key(exported)))
            ):
                raise UserError("K072.export-differs-checkpoint", where=str(target), key=key)
            progress("comparing the tensors", number / len(keys))
        return {"check": {"tensors": len(keys), "largest_difference": 0.0}}
    if request.form in ("hf", "merged", "adapter"):
        return _write_hf(request, path, target, progress)
    return _write_file(request, path, target, progress)


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor: NaN differs from itself."""
    return tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8)


def _write_hf(request: ExportRequest, path: Path, target: Path, progress: Progress) -> dict[str, Any]:
    recipe = request.run.read_recipe()
    add_files = partial(_add_files, request, path, tokenizer_of(_weights(request, path)))
    width = request.quantise
    if width not in ("int8", "int4"):
        _write_weights(request, recipe, path, target, add_files, progress)
    else:
        with reporting_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent, prefix=".trimaran-export-") as scratch:
            plain, quantised = Path(scratch) / "plain", Path(scratch) / "quantised"
            _write_weights(request, recipe, path, plain, lambda folder: None, progress)
            progress("quantising", 0.5)
            quantise_hf_folder(plain, quantised, width)

            def fill(draft: Path) -> None:
                for file in quantised.iterdir():
                    shutil.copyfile(file, draft / file.name)
                add_files(draft)

            write_folder(target, fill)
    if not request.check or not recipe.model.kind.in_transformers or recipe.model.trust_remote_code:
        return {}
    trained = open_trained(_weights(request, path), "fp32", cache=cache_folder(os.environ))
    return {"check": _compare(request, trained, target, progress)}


def _write_weights(
    request: ExportRequest,
    recipe: Recipe,
    path: Path,
    target: Path,
    add_files: Callable[[Path], None],
    progress: Progress,
) -> None:
    source, dtype = DiskSource(path), request.dtype
    if request.form == "hf":
        export_hf(source, recipe.model, target, dtype=dtype or "fp32", add_files=add_files, progress=progress)
    elif request.form == "adapter":
        export_adapter(source, recipe.model, target, dtype=dtype or "fp32", add_files=add_files, progress=progress)
    else:
        seed = recipe.train.seed
        refuse_other_base(recipe.model, source.progress.get("base") or {}, seed=seed, cache=cache_folder(os.environ),
                          report_progress=lambda fraction: progress("hashing the base", fraction))  # fmt: skip
        export_merged(source, recipe.model, target, seed=seed, dtype=dtype, add_files=add_files, progress=progress)


def _write_file(request: ExportRequest, path: Path, target: Path, progress: Progress) -> dict[str, Any]:
    trained = open_trained(_weights(request, path), "fp32", cache=cache_folder(os.environ))
    facts: dict[str, Any] = {}

    def fill(draft: Path) -> None:
        network = trained.network
        if request.form == "gguf":
            name, kind = request.run.read_recipe().name, request.precision
            left_out = write_gguf(network, trained.tokenizer, draft / FILE, name=name, kind=kind, progress=progress)
            facts.update({"tokenizer_left_out": left_out} if left_out else {})
        else:
            module = graph_module(network, f"--to {request.form}")
            if request.quantise in ("int8", "int4"):
                quantise_linears(module, request.quantise)
            if request.form == "onnx":
                write_onnx(module, draft / ONNX, max_seq_len=network.max_seq_len)
            else:
                write_program(module, draft / PROGRAM, max_seq_len=network.max_seq_len)
        _add_files(request, path, None if request.form == "gguf" else trained.tokenizer, draft)

    with reporting_errors(target):
        write_folder(target, fill)
    if request.check:
        facts["check"] = _compare(request, trained, target, progress)
    return facts


def _compare(request: ExportRequest, trained: TrainedModel, target: Path, progress: Progress) -> dict[str, float]:
    network, precision, recipe = trained.network, request.precision, request.run.read_recipe()
    if request.form == "onnx":
        exported = read_onnx(target / ONNX)
    elif request.form == "torch-export":
        exported = read_program(target / PROGRAM)
    elif request.form == "gguf":
        exported = network_logits(read_gguf(target / FILE, gguf_spec(network)))
    else:  # by transformers, if it knows the model and is installed
        is_known = request.form != "adapter" and recipe.model.kind.reads != "images"
        exported = hf_logits(target) if is_known else None
        if exported is None:
            exported = network_logits(open_trained(TrainedWeights(path=target), "fp32", cache=None).network)
    progress("comparing the logits", 0.5)
    if request.form == "merged" and request.dtype is None and request.quantise is None:
        precision = stored_dtype(target)  # that of the base
    batches = sample_tokens(network.vocabulary, network.max_seq_len)
    if trained.rules is not None:  # an image token needs an image
        batches = [tokens.masked_fill(tokens == trained.rules.image_token, 0) for tokens in batches]
    difference = compare_logits(network_logits(network), exported, batches, precision=precision)
    refuse_difference(difference, str(target))
    return asdict(difference)


def _weights(request: ExportRequest, path: Path) -> TrainedWeights:
    return TrainedWeights(path=path, run=request.run, step=step_of(path))


def _add_files(request: ExportRequest, path: Path, tokenizer: Tokenizer | None, folder: Path) -> None:
    save_tokenizer(tokenizer, folder)
    card = model_card(request, DiskSource(path).manifest, folder.name)
    (folder / CARD).write_text(card, encoding="utf-8")
