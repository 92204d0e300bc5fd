"""`trimaran export`: converts a checkpoint for other programs."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
Form = Literal["hf", "dcp", "adapter", "merged"]


def export(  # noqa: PLR0913 - each option of a command is a parameter
    run: RunName,
    step: Annotated[int | None, typer.Option(metavar="N", help="Step of the checkpoint. [default: the newest]")] = None,
    to: Annotated[Format, typer.Option("--to", help="Hugging Face folder, or torch distributed checkpoint.")] = "hf",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A new folder. [default: RUN/exports/step-N-hf]")
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="The dtype of Hugging Face weights. [default: fp32; with --merge: the base's]")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapter into whole weights.")] = False,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint to a folder that other programs read. It is verified first; no rank is started.

    `hf` has the weights, config.json and the tokenizer. `dcp` has weights and optimizer states for
    torch.distributed.checkpoint.load. Of a run with an adapter, `hf` is the adapter in PEFT's format; --merge adds it
    to the weights of the base instead.

    \b
    trimaran export runs/stdlib-tiny
    trimaran export runs/stdlib-tiny --step 40 --to dcp --out /data/for-torchtitan
    trimaran export runs/my-adapter --merge
    """
    if to == "dcp" and (dtype is not None or merge):
        option = "--dtype" if dtype is not None else "--merge"
        raise UserError("A001", f"{option} is for --to hf: a DCP folder has the tensors of the checkpoint as they are",
                        where=option, fix=f"leave {option} out")  # fmt: skip
    refuse_unusable(os.environ)
    from trimaran.app.views.clean_console import open_console
    from trimaran.app.views.progress_bar import progress_bar

    began, directory = time.monotonic(), find_run(run)
    form = _form(directory, to, merge=merge)
    with progress_bar(open_console(stderr=True)) as progress:

        def write(path: Path) -> Path:
            target = out or directory.path / "exports" / f"{path.name}-{form}"
            if damages := verify_all(path, lambda fraction: progress("verifying", fraction)):
                raise DamagedError(path, damages)
            _write(directory, path, target, form, dtype, progress)
            return target

        path, target = with_step(directory.checkpoints, step, write, where=str(directory.path))
    size = sum(file.stat().st_size for file in target.iterdir())
    facts = {"run_dir": str(directory.path), "step": int(path.name.removeprefix("step-")), "to": to, "form": form}
    if as_json:
        facts |= {"path": str(target), "bytes": size, "seconds": round(time.monotonic() - began, 3)}
        typer.echo(json.dumps(facts))
    else:
        typer.echo(f"step {facts['step']} is in {target} ({show_bytes(size)})")


def _form(run: "RunDirectory", to: Format, *, merge: bool) -> Form:
    """Return what the folder holds: whole weights, an adapter, a base with the adapter merged, or a DCP checkpoint."""
    has_adapter = run.read_recipe().model.adapter is not None
    if merge and not has_adapter:
        raise UserError("A001", "this run has no adapter to merge: an export has its whole weights", where="--merge",
                        fix="leave --merge out")  # fmt: skip
    if to == "dcp":
        return "dcp"
    return "merged" if merge else "adapter" if has_adapter else "hf"


def _write(
    run: "RunDirectory",
    path: Path,
    target: Path,
    form: Form,
    dtype: Dtype | None,
    progress: Callable[[str, float], None],
) -> None:
    """Write the checkpoint in `path` to `target`, in this form."""
    from trimaran.checkpoint.convert import export_dcp, export_hf
    from trimaran.checkpoint.convert_adapter import export_adapter, export_merged
    from trimaran.checkpoint.disk_source import DiskSource

    source, recipe = DiskSource(path), run.read_recipe()
    if form == "dcp":
        export_dcp(source, target, progress=progress)
        return
    add_files = _tokenizer_writer(run, recipe)
    if form == "hf":
        export_hf(source, recipe.model, target, dtype=dtype or "fp32", add_files=add_files, progress=progress)
    elif form == "adapter":
        export_adapter(source, recipe.model, target, dtype=dtype or "fp32", add_files=add_files, progress=progress)
    else:
        _refuse_other_base(recipe, source.progress.get("base") or {}, progress)
        seed = recipe.train.seed
        export_merged(source, recipe.model, target, seed=seed, dtype=dtype, add_files=add_files, progress=progress)


def _refuse_other_base(recipe: Recipe, saved: dict[str, Any], progress: Callable[[str, float], None]) -> None:
    from trimaran.data.prepare_text import cache_folder
    from trimaran.infer.adapted_network import refuse_other_base

    refuse_other_base(recipe.model, saved, seed=recipe.train.seed, cache=cache_folder(os.environ),
                      report_progress=lambda fraction: progress("hashing the base", fraction))  # fmt: skip


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
