"""Commands that list what a recipe can name: `trimaran presets`, `plugins` and `schema`."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from trimaran.app.recipe.options import Json
from trimaran.app.show.clean_console import open_console, plain_table
from trimaran.core import EXIT_DONE, EXIT_USER, KINDS, Recipe, UserError, installed_plugins, load, show_count
from trimaran.models import PERCEPTION_PRESETS, PRESETS, VLM_PRESETS

if TYPE_CHECKING:
    from rich.table import Table


def presets(as_json: Json = False) -> None:
    """List the named model shapes. Use one with --set model.preset=NAME, and its model.family.

    \b
    trimaran presets
    trimaran plan --set model.preset=llama-3-8b --set cluster=8xH100
    """
    if as_json:
        # Presets of two families may share a name.
        others = {"vlm": VLM_PRESETS, "perception": PERCEPTION_PRESETS}
        named = {**PRESETS, **{f"{family}/{name}": spec for family, table in others.items()
                               for name, spec in table.items()}}  # fmt: skip
        typer.echo(json.dumps({key: asdict(spec) | {"parameters": spec.num_parameters} for key, spec in named.items()}))
        return
    console = open_console()
    decoders = _preset_table("weights", "layers", "hidden", "heads/kv", "ffn", "experts", "vocab", "context")
    for name, spec in PRESETS.items():
        experts = spec.block.experts
        cells = [show_count(spec.num_parameters), str(spec.layers), str(spec.hidden), f"{spec.heads}/{spec.kv_heads}"]
        cells += [str(experts.ffn), f"{experts.top_k} of {experts.num_experts}"] if experts else [str(spec.ffn), ""]
        decoders.add_row(name, *cells, str(spec.vocab), str(spec.max_seq_len))
    console.print(decoders)
    console.print("\nmodel.family: vlm", style="dim")
    vlms = _preset_table("weights", "vision", "layers", "images", "language", "layers", "hidden", "context")
    for name, spec in VLM_PRESETS.items():
        vision, text = spec.vision, spec.language
        images = f"any, by {vision.patch}" if vision.variant == "native" else f"tiles {vision.tile}"
        cells = [show_count(spec.num_parameters), show_count(vision.num_parameters), str(vision.layers), images]
        cells += [show_count(text.num_parameters), str(text.layers), str(text.hidden), str(text.max_seq_len)]
        vlms.add_row(name, *cells)
    console.print(vlms)
    console.print("\nmodel.family: perception", style="dim")
    perceptions = _preset_table("weights", "cameras", "pixels", "hidden", "lidar", "radar", "fusion", "cells")
    for name, spec in PERCEPTION_PRESETS.items():
        cells = [show_count(spec.num_parameters), str(spec.cameras), f"{spec.width}x{spec.height}", str(spec.hidden)]
        cells += [str(spec.lidar_layers), str(spec.radar_layers), str(spec.fusion_layers)]
        perceptions.add_row(name, *cells, f"{spec.cells}x{spec.cells}")
    console.print(perceptions)


def _preset_table(*columns: str) -> "Table":
    table = plain_table(gap=1)
    table.add_column("preset", style="bold", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def plugins(as_json: Json = False) -> int:
    """List the plug-ins of installed packages: kind, name, package, version, and whether each can be loaded.

    Each is imported to find out. One that cannot be used is left out wherever it would be used, and nothing else.

    Exit codes: 0 all can be loaded; 2 one cannot.

    \b
    trimaran plugins
    trimaran plugins --json
    """
    found: list[dict[str, Any]] = []
    for plugin in (each for kind in KINDS for each in installed_plugins(kind)):
        problem: dict[str, Any] | None = None
        try:
            load(plugin)
        except UserError as error:
            problem = error.as_dict()
        found.append(plugin.as_dict() | {"target": plugin.target, "loaded": problem is None, "error": problem})
    failed = [each for each in found if each["error"]]
    if as_json:
        kinds = {name: {"group": kind.group, "contract": kind.contract} for name, kind in KINDS.items()}
        typer.echo(json.dumps({"plugins": found, "failed": len(failed), "kinds": kinds}))
        return EXIT_USER if failed else EXIT_DONE
    if not found:
        typer.echo("No plug-ins are installed. docs/guides/plugins.md shows how to write one.")
    else:
        table = plain_table(gap=1)
        for column in ("kind", "name", "package", "version", "state"):
            table.add_column(column, no_wrap=column != "state")
        for each in found:
            state = "loaded" if each["loaded"] else "left out"
            table.add_row(each["kind"], each["name"], each["distribution"], each["version"], state)
        open_console().print(table)
    for each in failed:
        error = each["error"]
        typer.echo(f"{error['code']}: {error['what']}\n  where: {error['where']}\n  fix:   {error['fix']}", err=True)
    return EXIT_USER if failed else EXIT_DONE


def schema() -> None:
    """Print the JSON Schema of a recipe. Editors use it to complete and check recipes.

    \b
    trimaran schema > recipe.schema.json
    and as the first line of a recipe:
    # yaml-language-server: $schema=recipe.schema.json
    """
    typer.echo(json.dumps(Recipe.model_json_schema(), indent=2))
