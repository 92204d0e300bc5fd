"""`trimaran eval`: the loss of a trained model on held-out or other data, and tasks of lm-eval."""

import json
import os
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trimaran.app import Json, TrainedModelName, complete_data
from trimaran.core import DataSection, UserError, expand_user
from trimaran.runs import append_line, refuse_unusable
from trimaran.serve.app.trained_weights import find_weights
from trimaran.serve.settings import TrainedWeights

Source = Literal["text", "jsonl", "shards", "datasets"]
DEFAULT_SEQ_LEN = 1024
SHARDS_META = "meta.json"
DATASET_FILES = ("dataset_info.json", "dataset_dict.json")
SUFFIXES: dict[str, Source] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "datasets", ".arrow": "datasets"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """Weights to evaluate. Without `data` it is the held-out data of their run. `batches` None: all of them."""

    weights: TrainedWeights
    data: str | None = None
    source: Source | None = None
    seq_len: int | None = None
    batches: int | None = None

    def section(self, data: str) -> DataSection:
        recipe = self.weights.recipe
        usual, source = recipe.data.seq_len if recipe else DEFAULT_SEQ_LEN, self.source
        if source is None:  # by the name and the files
            path = expand_user(data)
            if not path.exists():
                raise UserError("A046.no-such-file", where=f"--data {data}")
            name = path.name.removesuffix(".gz").removesuffix(".zst")
            if (path / SHARDS_META).is_file():
                source = "shards"
            elif any((path / each).is_file() for each in DATASET_FILES):
                source = "datasets"
            else:
                source = next((kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)), "text")
        return DataSection(source=source, path=data, seq_len=max(2, self.seq_len or usual),
                           isolate_documents=recipe.data.isolate_documents if recipe else False,
                           text_field=recipe.data.text_field if recipe else "text")  # fmt: skip


def eval(
    model: TrainedModelName,
    step: Annotated[int | None, typer.Option(min=0, metavar="N", help="Evaluate the checkpoint of this step.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="A text file or folder, JSONL, packed shards or a dataset. [default: the run's held-out data]",
            autocompletion=complete_data,
        ),
    ] = None,
    source: Annotated[Source | None, typer.Option(help="The format of --data. [default: by its name]")] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens per sequence of --data. [default: the run's, or 1024]"),
    ] = None,
    batches: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="How many batches. [default: as the trainer; all of --data]")
    ] = None,
    tasks: Annotated[str | None, typer.Option(metavar="NAME,...", help="Tasks of lm-eval, instead of a loss.")] = None,
    task_folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder with task files (YAML) of your own.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Samples of each task.")] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a trained model on one process: loss, perplexity and bits per byte, or tasks of lm-eval.

    Of a run, the newest weights are evaluated on the data that it held out, and the loss is the one that the trainer
    reports for them. The result is also kept in the run directory, in evaluations.jsonl.

    \b
    trimaran eval runs/stdlib-tiny
    trimaran eval runs/stdlib-tiny --step 40 --batches 16 --json
    trimaran eval ./Qwen2.5-0.5B --data notes.txt
    trimaran eval runs/my-chat --tasks my_task --task-folder tasks/
    """
    if tasks is None and (task_folder is not None or limit is not None):
        option = "--task-folder" if task_folder is not None else "--limit"
        raise UserError("A001.tasks", where=option, option=option)
    if tasks is not None and data is not None:
        raise UserError("A001.task-brings-own", where="--data")
    weights = find_weights(model, step, for_text=tasks is not None or data is not None)
    request = EvalRequest(weights=weights, data=data, source=source, seq_len=seq_len, batches=batches)
    refuse_unusable(os.environ)
    from trimaran.app import open_console
    from trimaran.app.show.clean_console import progress_bar
    from trimaran.serve.app.evaluate_trained import evaluate_loss, evaluate_tasks

    began = time.monotonic()
    # What other packages print is not part of the answer.
    with progress_bar(open_console(stderr=True)) as progress, redirect_stdout(sys.stderr):
        if tasks is None:
            found = evaluate_loss(request, progress)
        else:
            names = [name.strip() for name in tasks.split(",") if name.strip()]
            found = evaluate_tasks(request, names, task_folder, limit, progress)
    found["seconds"] = round(time.monotonic() - began, 3)
    if weights.run is not None:
        append_line(weights.run.evaluations, {key: value for key, value in found.items() if key != "run_dir"})
    typer.echo(json.dumps(found) if as_json else "\n".join(_lines(found)))


def _lines(found: dict[str, Any]) -> list[str]:
    at = f"step {found['step']} of {found['run_dir']}" if found["step"] is not None else found["model"]
    if "tasks" in found:
        rows = [f"{at}, {found['samples']} samples:"]
        for task, metrics in found["tasks"].items():
            numbers = (f"{name} {value:.4f}" for name, value in metrics.items() if isinstance(value, float))
            rows.append(f"  {task}: {', '.join(numbers)}")
        return rows
    text = f"{at}, {found['tokens']:,} tokens of {found['data']}: loss {found['loss']:.4f}, "
    text += f"perplexity {found['perplexity']:.4g}"
    if found["bits_per_byte"] is not None:
        text += f", {found['bits_per_byte']:.4f} bits per byte"
    from trimaran.app.runs.run_state import accuracy_texts

    accuracy = ", ".join(accuracy_texts(found.get("accuracy", {}), found.get("accuracy_counts", {})))
    return [text, *([f"  accuracy: {accuracy}"] if accuracy else [])]
