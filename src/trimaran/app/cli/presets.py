"""`trimaran presets`: the model shapes that have a name."""

import json
from dataclasses import asdict

import typer

from trimaran.app.cli.options import Json
from trimaran.core import show_count
from trimaran.models import PRESETS


def presets(as_json: Json = False) -> None:
    """List the model shapes that have a name; use one with --set model.preset=NAME.

    \b
    trimaran presets
    trimaran plan --set model.preset=llama-3-8b --set cluster=8xH100
    """
    if as_json:
        typer.echo(
            json.dumps({name: asdict(spec) | {"parameters": spec.num_parameters} for name, spec in PRESETS.items()})
        )
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("preset", style="bold", no_wrap=True)
    for column in ("weights", "layers", "hidden", "heads/kv", "ffn", "experts", "vocab", "context"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, spec in PRESETS.items():
        experts = spec.block.experts
        cells = [show_count(spec.num_parameters), str(spec.layers), str(spec.hidden), f"{spec.heads}/{spec.kv_heads}"]
        cells += [str(experts.ffn), f"{experts.top_k} of {experts.num_experts}"] if experts else [str(spec.ffn), ""]
        table.add_row(name, *cells, str(spec.vocab), str(spec.max_seq_len))
    Console(highlight=False).print(table)
