"""`trimaran plan`: how the work would be split, and what it would cost."""

import json
import shlex

import typer

from trimaran.app.cli.options import Json, RecipeFile, Settings, own_name
from trimaran.app.cli.request import Request, resolve
from trimaran.hardware import Cluster


def plan(recipe: RecipeFile = None, settings: Settings = None, as_json: Json = False) -> None:
    """Show how the work would be split, and what it would cost. Starts nothing and needs no GPU.

    \b
    trimaran plan recipes/stdlib-tiny.yaml
    trimaran plan --set model.preset=llama-3-8b --set cluster=8xH100 --json
    """
    request = resolve(recipe, settings or [])
    if as_json:
        typer.echo(json.dumps(answer(request)))
        return
    from rich.console import Console

    from trimaran.app.cli.plan_view import show_plan

    show_plan(request, Console(highlight=False))
    words = [*([recipe] if recipe else []), *(word for pair in settings or [] for word in ("--set", pair))]
    typer.echo(f"\nnext  {shlex.join([*_starter(request.cluster), 'train', *words])}")


def _starter(cluster: Cluster) -> list[str]:
    """Return what `train` is typed after; several nodes need a torchrun on each, meeting on the first."""
    if cluster.num_nodes == 1:
        return [own_name()]
    ranks = [f"--nnodes={cluster.num_nodes}", f"--nproc-per-node={cluster.devices_per_node}"]
    return ["torchrun", *ranks, "--rdzv-backend=c10d", "--rdzv-endpoint=FIRST_NODE:29500", "-m", "trimaran"]


def answer(request: Request) -> dict[str, object]:
    """Return what `--json` prints: the plan, and the prediction term by term."""
    prediction = request.plan.prediction
    return {
        "name": request.recipe.name,
        "cluster": request.recipe.cluster,
        "plan": request.plan.model_dump(mode="json"),
        "prediction": prediction.model_dump(mode="json") if prediction else None,
    }
