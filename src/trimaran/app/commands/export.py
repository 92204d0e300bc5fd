"""`trimaran export`: converts a checkpoint for other programs."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trimaran.app.request.options import Json, RunName, find_run
from trimaran.checkpoint.checkpoint_list import verify_all, with_step
from trimaran.checkpoint.manifest import DamagedError
from trimaran.core import Recipe, UserError, show_bytes
from trimaran.run.compile_cache import refuse_unusable

if TYPE_CHECKING:
    from trimaran.run import RunDirectory

Format = Literal["hf", "dcp"]
Dtype = Literal["fp32", "bf16"]


def export(
    run: RunName,
    step: Annotated[int | None, typer.Option(metavar="N", help="Step of the checkpoint. [default: the newest]")] = None,
    to: Annotated[Format, typer.Option("--to", help="Hugging Face folder, or torch distributed checkpoint.")] = "hf",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A new folder. [default: RUN/exports/step-N-hf]")
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="The dtype of Hugging Face weights. [default: fp32]")] = None,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint to a folder that other programs read. It is verified first; no rank is started.

    `hf` has the weights, config.json and the tokenizer. `dcp` has weights and optimizer states for
    torch.distributed.checkpoint.load.

    \b
    trimaran export runs/stdlib-tiny
    trimaran export runs/stdlib-tiny --step 40 --to dcp --out /data/for-torchtitan
    """
    if to == "dcp" and dtype is not None:
        raise UserError("A001", "--dtype is for --to hf: a DCP folder keeps the dtype of every tensor",
                        where="--dtype", fix="leave --dtype out")  # fmt: skip
    refuse_unusable(os.environ)
    from trimaran.app.views.clean_console import open_console
    from trimaran.app.views.progress_bar import progress_bar

    began, directory = time.monotonic(), find_run(run)
    with progress_bar(open_console(stderr=True)) as progress:

        def write(path: Path) -> Path:
            target = out or directory.path / "exports" / f"{path.name}-{to}"
            if damages := verify_all(path, lambda fraction: progress("verifying", fraction)):
                raise DamagedError(path, damages)
            _write(directory, path, target, dtype or "fp32" if to == "hf" else None, progress)
            return target

        path, target = with_step(directory.checkpoints, step, write, where=str(directory.path))
    size = sum(file.stat().st_size for file in target.iterdir())
    facts = {"run_dir": str(directory.path), "step": int(path.name.removeprefix("step-")), "to": to}
    if as_json:
        facts |= {"path": str(target), "bytes": size, "seconds": round(time.monotonic() - began, 3)}
        typer.echo(json.dumps(facts))
    else:
        typer.echo(f"step {facts['step']} is in {target} ({show_bytes(size)})")


def _write(
    run: "RunDirectory", path: Path, target: Path, dtype: str | None, progress: Callable[[str, float], None]
) -> None:
    """Write the checkpoint in `path` to `target`: as a Hugging Face folder with weights of `dtype`, or as DCP."""
    from trimaran.checkpoint.convert import export_dcp, export_hf
    from trimaran.checkpoint.disk_source import DiskSource

    source, recipe = DiskSource(path), run.read_recipe()
    if dtype is None:
        export_dcp(source, target, progress=progress)
    else:
        beside = _tokenizer_writer(run, recipe)
        export_hf(source, recipe.model, target, dtype=dtype, add_files=beside, progress=progress)


def _tokenizer_writer(run: "RunDirectory", recipe: Recipe) -> Callable[[Path], None]:
    """Return a function that saves the run's tokenizer to a folder: that of its saved weights, or that of its data."""
    from trimaran.data import TokenShards
    from trimaran.data.tokenizer import load_tokenizer
    from trimaran.infer.generate import TOKENIZER, open_saved_tokenizer, save_tokenizer

    if (run.model / TOKENIZER).is_file():
        tokenizer = open_saved_tokenizer(run.model)
    elif recipe.data.source == "shards" and recipe.data.path:
        tokenizer = TokenShards.open(Path(recipe.data.path)).tokenizer
    else:
        tokenizer = load_tokenizer(recipe.data.tokenizer)
    return lambda folder: save_tokenizer(tokenizer, folder)
