"""`trimaran export`: converts a checkpoint for other programs."""

import json
import os
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trimaran.app import Json, RunName, find_run
from trimaran.checkpoint import DamagedError, verify_all, with_step
from trimaran.core import UserError, show_bytes
from trimaran.runs import RunDirectory, refuse_unusable

Format = Literal["hf", "dcp", "gguf", "onnx", "torch-export"]
Dtype = Literal["fp32", "fp16", "bf16"]
Quantise = Literal["int8", "int4", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
Form = Literal["hf", "dcp", "adapter", "merged", "gguf", "onnx", "torch-export"]
DTYPES: dict[Format, tuple[Dtype, ...]] = {
    "hf": ("fp32", "bf16"),
    "dcp": (),
    "gguf": ("fp32", "fp16", "bf16"),
    "onnx": ("fp32",),
    "torch-export": ("fp32",),
}
QUANTISED: dict[Format, tuple[Quantise, ...]] = {
    "hf": ("int8", "int4"),
    "dcp": (),
    "gguf": ("int8", "int4", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"),
    "onnx": (),
    "torch-export": ("int8", "int4"),
}
WHY_NOT = {
    "dcp": "a DCP folder has the tensors of the checkpoint as they are",
    "onnx": "an ONNX graph is written in fp32: quantise it with the tools of its runtime",
    "torch-export": "a graph of torch is written in fp32 or with quantised weights",
    "hf": "a Hugging Face folder of torchao has int8 or int4 weights",
}
# In a GGUF file these are the types with 32 values for each scale.
GGUF_WIDTHS: dict[str, Quantise] = {"int8": "q8_0", "int4": "q4_0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """One export of one checkpoint. `quantise` None: weights in `dtype`; `dtype` None: the default of the form."""

    run: RunDirectory
    form: Form
    dtype: Dtype | None = None
    quantise: Quantise | None = None
    check: bool = True

    @property
    def precision(self) -> str:
        """How weights are stored: a key of `serve.exports.compare_logits.BOUNDS`."""
        if self.quantise is not None:
            return GGUF_WIDTHS.get(self.quantise, self.quantise) if self.form == "gguf" else self.quantise
        return self.dtype or "fp32"

    def folder(self, step_name: str) -> Path:
        suffix = f"-{self.precision}" if self.quantise else ""
        return self.run.path / "exports" / f"{step_name}-{self.form}{suffix}"


def make_request(
    run: RunDirectory, to: Format, *, dtype: Dtype | None, quantise: Quantise | None, merge: bool, check: bool
) -> ExportRequest:
    """Return the request; raise UserError if an option does not belong to the format or to the run."""
    for option, value, allowed in (("--dtype", dtype, DTYPES[to]), ("--quantise", quantise, QUANTISED[to])):
        if value is not None and value not in allowed:
            why = WHY_NOT.get(to, "this format cannot hold it")
            fix = f"use {' or '.join(allowed)}, or leave {option} out" if allowed else f"leave {option} out"
            raise UserError("A001.not-for-format", where=option, fix=fix, option=option, value=value, to=to, why=why)
    family, is_weights = run.read_recipe().model.kind, to in ("hf", "dcp")
    if not family.is_language_model and (quantise or not is_weights):
        why = f"has the family {family.name} of a plug-in" if family.is_plugin else f"takes {family.reads}"
        what = "quantised exports" if is_weights else f"{to} exports of Trimaran"
        raise UserError("K070.language-models", where="--quantise" if is_weights else f"--to {to}", text=what, why=why)
    if dtype is not None and quantise is not None:
        raise UserError("A001.quantised-weights", where="--dtype")
    if merge and to != "hf":
        why = WHY_NOT["dcp"] if to == "dcp" else f"--to {to} always has whole weights"
        raise UserError("A001.merge-hf", where="--merge", why=why)
    has_adapter = run.read_recipe().model.adapter is not None
    if merge and not has_adapter:
        raise UserError("A001.run-no-adapter", where="--merge")
    form: Form = to
    if to == "hf" and merge:
        form = "merged"
    elif to == "hf" and has_adapter:
        form = "adapter"
    if form == "adapter" and quantise:
        raise UserError("A001.adapter-not-quantised", where="--quantise")
    return ExportRequest(run=run, form=form, dtype=dtype, quantise=quantise, check=check)


def export(
    run: RunName,
    step: Annotated[int | None, typer.Option(metavar="N", help="Step of the checkpoint. [default: the newest]")] = None,
    to: Annotated[Format, typer.Option("--to", help="The format; see below.")] = "hf",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A new folder. [default: RUN/exports/step-N-FORMAT]")
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="The dtype of the weights. [default: fp32; with --merge: the base's]")
    ] = None,
    quantise: Annotated[
        Quantise | None,
        typer.Option(help="Quantise the weights: int8 or int4 (hf, torch-export, gguf); the q types are GGUF's."),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapter into whole weights.")] = False,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Do not load the export again to compare its logits.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint to a folder that other programs read. It is verified first; no rank is started.

    `hf` has the weights, config.json, the tokenizer and a model card. `dcp` has weights and optimizer states for
    torch.distributed.checkpoint.load. `gguf` is a file for llama.cpp. `onnx` and `torch-export` are graphs from token
    ids to logits. Of a run with an adapter, `hf` is the adapter in PEFT's format; --merge adds it to the weights of the
    base instead. The export is loaded again and its logits are compared with those of the checkpoint.

    \b
    trimaran export runs/stdlib-tiny
    trimaran export runs/stdlib-tiny --step 40 --to dcp --out /data/for-torchtitan
    trimaran export runs/stdlib-tiny --to gguf --quantise q8_0
    trimaran export runs/stdlib-tiny --to torch-export --quantise int8
    trimaran export runs/my-adapter --merge
    """
    directory = find_run(run)
    request = make_request(directory, to, dtype=dtype, quantise=quantise, merge=merge, check=not no_check)
    refuse_unusable(os.environ)
    from trimaran.app import open_console
    from trimaran.app.show.clean_console import progress_bar

    began = time.monotonic()
    # What other packages print is not part of the answer.
    with progress_bar(open_console(stderr=True)) as progress, redirect_stdout(sys.stderr):

        def write(path: Path) -> tuple[Path, dict[str, Any]]:
            from trimaran.serve.app.export_run import export_step

            target = out or request.folder(path.name)
            if damages := verify_all(path, lambda fraction: progress("verifying", fraction)):
                raise DamagedError(path, damages)
            return target, export_step(request, path, target, progress)

        path, (target, found) = with_step(directory.checkpoints, step, write, where=str(directory.path))
    size = sum(file.stat().st_size for file in target.iterdir())
    facts = {"run_dir": str(directory.path), "step": int(path.name.removeprefix("step-")), "to": to}
    facts |= {"form": request.form, "precision": request.precision} | found
    if as_json:
        facts |= {"path": str(target), "bytes": size, "seconds": round(time.monotonic() - began, 3)}
        typer.echo(json.dumps(facts))
        return
    typer.echo(f"step {facts['step']} is in {target} ({show_bytes(size)})")
    if left_out := found.get("tokenizer_left_out"):
        typer.echo(f"  without the tokenizer: {left_out}")
    if (check := found.get("check")) is None:
        typer.echo("  not compared with the checkpoint")
    elif "tensors" in check:
        typer.echo(f"  read again: all {check['tensors']} tensors are equal to the checkpoint's")
    else:
        size = f"the largest difference of a logit is {check['largest_difference']:.2g}"
        share = f"{check['relative_difference']:.2g} of their size, at most {check['bound']:g}"
        typer.echo(f"  loaded again: {size} ({share}); {check['same_choice']:.1%} of the likeliest tokens are the same")
