"""`trimaran export`: converts a checkpoint for other programs."""

import json
import os
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from trimaran.app.recipe.options import Json, RunName, find_run
from trimaran.checkpoint.checkpoint_list import verify_all, with_step
from trimaran.checkpoint.manifest import DamagedError
from trimaran.core import show_bytes
from trimaran.runs.compile_cache import refuse_unusable
from trimaran.serve.app.export_request import Dtype, Format, Quantise, make_request


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
    from trimaran.app.show.clean_console import open_console
    from trimaran.app.show.progress_bar import progress_bar

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
    else:
        typer.echo(f"step {facts['step']} is in {target} ({show_bytes(size)})")
        _show_check(found)


def _show_check(found: dict[str, Any]) -> None:
    """Print what the comparison found, and what the format had no place for."""
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
