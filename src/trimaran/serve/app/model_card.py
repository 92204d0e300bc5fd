"""The model card of an export: README.md with the front matter of the Hugging Face Hub."""

import json
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from trimaran.app.runs.run_state import RunState
from trimaran.checkpoint.manifest import Manifest
from trimaran.core import show_count, show_seconds
from trimaran.core.version import VERSION
from trimaran.models.resolve import model_text
from trimaran.runs.evaluation_records import read_evaluations
from trimaran.serve.app.export_request import ExportRequest

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


def write_model_card(request: ExportRequest, manifest: Manifest, folder: Path) -> None:
    """Write the card into the folder of an export. `manifest` is that of the checkpoint."""
    (folder / CARD).write_text(model_card(request, manifest, folder.name), encoding="utf-8")


def model_card(request: ExportRequest, manifest: Manifest, folder: str) -> str:
    """Return the text of the card: the recipe, the plan, the data, training, evaluation, versions and how to load it.

    Everything in it is from the files of the run. What is not known is left out.
    """
    folder = folder.removeprefix(".").removesuffix(".draft")
    state = RunState(request.run)
    state.refresh()
    sections = (
        ("Training", _training(state, manifest)),
        ("Evaluation", _evaluation(state, manifest)),
        ("Load it", _usage(request, folder)),
        ("Versions", [f"{name} {number}" for name, number in _versions()]),
        ("Plan", [f"`{state.plan}`", "", "```json", json.dumps(_plan_tree(state), indent=2), "```"]),
        ("Recipe", ["```yaml", state.run.recipe.read_text(encoding="utf-8").rstrip(), "```"]),
    )
    front = yaml.safe_dump(_front_matter(request, state, manifest), sort_keys=False, allow_unicode=True)
    lines = ["---", front.rstrip(), "---", "", f"# {state.recipe.name}", ""]
    model = model_text(state.recipe.model, state.recipe.data)
    lines += [f"{model}, trained with Trimaran; the checkpoint of step {manifest.step}."]
    for title, body in sections:
        if body:
            lines += [
                "",
                f"## {title}",
                "",
                *(_bullets(body) if title in ("Training", "Evaluation", "Versions") else body),
            ]
    return "\n".join(lines) + "\n"


def _bullets(lines: list[str]) -> list[str]:
    return [f"- {line}" for line in lines]


def _front_matter(request: ExportRequest, state: RunState, manifest: Manifest) -> dict[str, Any]:
    """Return the metadata that the Hub reads."""
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
    return tree


def _training(state: RunState, manifest: Manifest) -> list[str]:
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
    """Return what is known of the checkpoint's loss on held-out data: by the run itself, then by `trimaran eval`."""
    own = [{"loss": float(loss), "data": "held-out"} for step, loss in state.evaluations if step == manifest.step]
    later = [row for row in read_evaluations(state.run) if row.get("step") == manifest.step]
    return own + [row for row in later if row.get("data") == "held-out"]


def _evaluation(state: RunState, manifest: Manifest) -> list[str]:
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


def _usage(request: ExportRequest, folder: str) -> list[str]:
    code = LOAD.get(request.form, LOAD["hf"]).format(folder=folder)
    lines = ["```python", code, "```"]
    if request.form in SERVED:
        lines += ["", "```sh", f"trimaran serve {folder}", f'trimaran generate {folder} --prompt "Hello"', "```"]
    elif request.form == "gguf":
        lines += ["", "```sh", f"llama-server -m {folder}/model.gguf", "```"]
    if request.quantise:
        lines += ["", f"The weights of linear layers are quantised: {request.precision}."]
    return lines


def _versions() -> Iterator[tuple[str, str]]:
    yield "trimaran", VERSION
    yield "Python", platform.python_version()
    for name in LIBRARIES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _plan_tree(state: RunState) -> dict[str, Any]:
    return state.plan.model_dump(mode="json", exclude_defaults=True, exclude={"prediction"})
