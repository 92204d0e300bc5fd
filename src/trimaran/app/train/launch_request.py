"""Builds the request of `trimaran launch`: recipe and plan, the site's defaults, and where the run directory is."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from trimaran.app.plan.run_cost import NODE_DISK_BANDWIDTH
from trimaran.app.recipe.hub_files import with_local_files
from trimaran.app.recipe.options import RUNS
from trimaran.app.recipe.recipe_tokenizer import with_model_tokenizer
from trimaran.app.recipe.request import Request, resolve
from trimaran.core import Seconds, UserError
from trimaran.cost import STATE_BYTES
from trimaran.cost.goodput import checkpoint_bytes, write_seconds
from trimaran.launch.targets.site_file import read_site_file, site_path, site_section
from trimaran.launch.targets.target import SAVE_SECONDS, LaunchRequest, Target, job_name
from trimaran.runs import free_run_path, refuse_occupied

SECRETS = ("HF_TOKEN", "WANDB_API_KEY")  # what libraries of ours read from the environment
EXAMPLE_IMAGE = "registry.example/trimaran:1.0"
HOST = re.compile(r"[^\s,]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Options of `trimaran launch`. `site` are settings `FIELD=VALUE` of the target's section in the site file."""

    run_dir: Path | None = None
    hosts: str = ""
    site: Sequence[str] = ()
    check: bool = True


def resolve_launch(recipe: str | None, settings: Sequence[str]) -> Request:
    """Return the recipe and its plan as they are launched. Reads no data."""
    request = resolve(recipe, settings)
    local = with_local_files(request.recipe, weights=False)
    return replace(request, recipe=with_model_tokenizer(local))


def read_site(target: Target, settings: Sequence[str]) -> object:
    """Return the target's section of the site file, with `settings` on top."""
    path = site_path(os.environ)
    return site_section(read_site_file(path), target.name, target.site_model, settings, where=str(path))


def preview_options(target: Target) -> LaunchOptions:
    """Return the options to show launch files with: an image to replace, where the site file names none."""
    needs_image = target.name == "k8s" and not getattr(read_site(target, ()), "image", "")
    return LaunchOptions(site=[f"image={EXAMPLE_IMAGE}"] if needs_image else [])


def launch_request(target: Target, request: Request, options: LaunchOptions) -> LaunchRequest:
    """Return what to launch on `target`. Touches nothing."""
    site = read_site(target, options.site)
    run_dir, run_exists = _run_dir(target, request, options, site)
    return LaunchRequest(
        name=job_name(run_dir.name),
        run_dir=run_dir,
        recipe=request.recipe,
        plan=request.plan,
        cluster=request.cluster,
        site=site,
        hosts=tuple(HOST.findall(options.hosts)),
        run_exists=run_exists,
        check=options.check,
        save_seconds=_save_seconds(request),
        secrets=tuple(name for name in SECRETS if os.environ.get(name)),
    )


def _run_dir(target: Target, request: Request, options: LaunchOptions, site: object) -> tuple[Path, bool]:
    """Return the run directory as the nodes see it, and whether it is created here, on a disk that they share."""
    runs = getattr(site, "runs", "")
    if getattr(site, "shared_disk", target.shares_disk):
        path = (options.run_dir or free_run_path(Path(runs) if runs else RUNS, request.recipe.name)).absolute()
        refuse_occupied(path)
        return path, True
    asked = PurePosixPath(str(options.run_dir)) if options.run_dir else PurePosixPath(runs) / request.recipe.name
    if not asked.is_absolute():
        raise UserError("L005", f"the run directory '{asked}' is not an absolute path on the nodes",
                        where="--run-dir", fix=f"name a folder as the nodes of {target.name} see it")  # fmt: skip
    return Path(asked), False


def _save_seconds(request: Request) -> Seconds:
    """Return how long a checkpoint takes with the disk bandwidth that `trimaran plan` assumes for a node."""
    if not request.outline:
        return SAVE_SECONDS
    moments = STATE_BYTES[request.recipe.train.optimizer.states]
    states = checkpoint_bytes(request.outline.saved_parameters, moment_bytes=moments)
    return write_seconds(states, disk_bandwidth=NODE_DISK_BANDWIDTH * request.cluster.num_nodes)
