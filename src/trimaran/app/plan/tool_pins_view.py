"""Shows how a file of another tool was read: each field with the `--set` that it became, and what was left out."""

import typer

from trimaran.app.plan.tool_pins import ToolFile
from trimaran.core import Recipe
from trimaran.machine import Cluster
from trimaran.planner.read.read_config import ReadField


def show_tool_file(tool_file: ToolFile, cluster: Cluster, recipe: Recipe) -> None:
    """Print the translation of a file, which is part of `recipe`."""
    found = tool_file.found
    typer.echo(f"{tool_file.path} ({found.tool}), as pins of the plan:")
    rows = [(each.text, settings_of(each)) for each in found.fields if each.pins]
    width = max((len(text) for text, _ in rows), default=0)
    for text, pins in rows:
        typer.echo(f"  {text:{width}}  {pins}")
    for name, value in found.pins_on(cluster.world_size).items():
        if found.pins.get(name) != value:
            typer.echo(f"  {f'on {cluster}':{width}}  --set {name}={value}")
    batch = recipe.train.global_batch
    if batch == found.usual_batch_on(cluster.world_size, recipe.data.seq_len):
        typer.echo(f"  {'no micro-batch in the file: a usual one':{width}}  --set train.global_batch={batch}")
    if found.left_out or tool_file.mismatch(cluster):
        typer.echo("left out:")
    for each in found.left_out:
        typer.echo(f"  {each.text}: {each.why}")
    if mismatch := tool_file.mismatch(cluster):
        typer.echo(f"  {mismatch}")
    typer.echo("")


def settings_of(field: ReadField) -> str:
    """Return the pins of a field as options."""
    values = {name: str(value).lower() if isinstance(value, bool) else value for name, value in field.pins.items()}
    return " ".join(f"--set {name}={value}" for name, value in values.items())
