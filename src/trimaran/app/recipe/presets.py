"""`trimaran presets`: lists the named model shapes."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from trimaran.app.recipe.options import Json
from trimaran.core import show_count
from trimaran.models import PERCEPTION_PRESETS, PRESETS, VLM_PRESETS

if TYPE_CHECKING:
    from rich.table import Table

_OTHERS = {"vlm": VLM_PRESETS, "perception": PERCEPTION_PRESETS}


def presets(as_json: Json = False) -> None:
    """List the named model shapes. Use one with --set model.preset=NAME, and its model.family.

    \b
    trimaran presets
    trimaran plan --set model.preset=llama-3-8b --set cluster=8xH100
    """
    if as_json:
        # Presets of two families may share a name.
        named = {**PRESETS, **{f"{family}/{name}": spec for family, table in _OTHERS.items()
                               for name, spec in table.items()}}  # fmt: skip
        typer.echo(json.dumps({key: asdict(spec) | {"parameters": spec.num_parameters} for key, spec in named.items()}))
        return
    from trimaran.app.show.clean_console import open_console

    console = open_console()
    console.print(_decoders())
    console.print("\nmodel.family: vlm", style="dim")
    console.print(_vlms())
    console.print("\nmodel.family: perception", style="dim")
    console.print(_perceptions())


def _table(*columns: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("preset", style="bold", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _decoders() -> "Table":
    table = _table("weights", "layers", "hidden", "heads/kv", "ffn", "experts", "vocab", "context")
    for name, spec in PRESETS.items():
        experts = spec.block.experts
        cells = [show_count(spec.num_parameters), str(spec.layers), str(spec.hidden), f"{spec.heads}/{spec.kv_heads}"]
        cells += [str(experts.ffn), f"{experts.top_k} of {experts.num_experts}"] if experts else [str(spec.ffn), ""]
        table.add_row(name, *cells, str(spec.vocab), str(spec.max_seq_len))
    return table


def _vlms() -> "Table":
    table = _table("weights", "vision", "layers", "images", "language", "layers", "hidden", "context")
    for name, spec in VLM_PRESETS.items():
        vision, text = spec.vision, spec.language
        images = f"any, by {vision.patch}" if vision.variant == "native" else f"tiles {vision.tile}"
        cells = [show_count(spec.num_parameters), show_count(vision.num_parameters), str(vision.layers), images]
        cells += [show_count(text.num_parameters), str(text.layers), str(text.hidden), str(text.max_seq_len)]
        table.add_row(name, *cells)
    return table


def _perceptions() -> "Table":
    table = _table("weights", "cameras", "pixels", "hidden", "lidar", "radar", "fusion", "cells")
    for name, spec in PERCEPTION_PRESETS.items():
        cells = [show_count(spec.num_parameters), str(spec.cameras), f"{spec.width}x{spec.height}", str(spec.hidden)]
        cells += [str(spec.lidar_layers), str(spec.radar_layers), str(spec.fusion_layers)]
        table.add_row(name, *cells, f"{spec.cells}x{spec.cells}")
    return table
