"""`trimaran doctor --fabric`: the environment against the preset of a fabric, as a diff. Nothing is set."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace

import typer
from rich.table import Table
from rich.text import Text

from trimaran.app.show.clean_console import open_console
from trimaran.app.show.text_chart import GREEN, ORANGE, RED
from trimaran.core import EXIT_DONE
from trimaran.machine import detect
from trimaran.machine.checks.fabric_presets import (
    FabricFacts,
    VariableChange,
    check_fabric,
    load_presets,
    preset_changes,
    read_fabric,
)
from trimaran.machine.checks.software import harmful, misspelt, useless, wrong_algorithms

MARKS = {"set": ("+", GREEN), "unset": ("-", RED), "try": ("?", ORANGE)}


def show_fabric(name: str, *, several_nodes: bool, as_json: bool) -> int:
    """Print how the environment differs from the preset of the fabric `name`, or of this machine's (`auto`)."""
    check_fabric(name)
    has_gpus = detect(visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES")).device.traits.backend == "nccl"
    facts = read_fabric(has_gpus=has_gpus, several_nodes=several_nodes)
    if name != "auto":
        # The cards of another fabric than the one that is named are not for it.
        facts = replace(facts, fabric=name, cards=facts.cards if facts.fabric == name else ())
    changes = preset_changes(facts, os.environ)
    problems = [*misspelt(os.environ), *wrong_algorithms(os.environ), *useless(os.environ)]
    named = {change.name for change in changes}
    problems += [each for each in harmful(os.environ, on_gpus=True) if each.what.partition("=")[0] not in named]
    if as_json:
        rows = [{**asdict(each), "is_done": each.is_done, "command": each.command} for each in changes]
        found = [{"what": each.what, "fix": each.fix} for each in problems]
        typer.echo(json.dumps({"fabric": facts.fabric, "cards": facts.cards, "interface": facts.interface,
                               "variables": rows, "problems": found}))  # fmt: skip
        return EXIT_DONE
    console = open_console()
    console.print(Text(_headline(facts), style="bold"))
    console.print(_diff(changes))
    for each in problems:
        console.print(Text(f"! {each.what}; {each.fix}", style=RED), soft_wrap=True)
    _show_commands([each for each in changes if each.step != "try"])
    return EXIT_DONE


def _headline(facts: FabricFacts) -> str:
    what = load_presets()[facts.fabric]["what"]
    cards = f"; cards {', '.join(facts.cards)}" if facts.cards else ""
    return f"{facts.fabric}: {what}{cards}" + (f"; interface {facts.interface}" if facts.interface else "")


def _diff(changes: Sequence[VariableChange]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style="dim")
    for each in changes:
        if each.step == "unset" and each.now is None:
            continue  # as it should be, and nobody asked
        mark, style = ("=", "dim") if each.is_done else MARKS[each.step]
        table.add_row(Text(mark, style=style), Text(_words(each), style=style), each.why)
    return table


def _words(change: VariableChange) -> str:
    if change.step == "unset":
        return f"{change.name}={change.now}"
    now = f" (now {change.now})" if change.now not in (None, change.value) else ""
    return f"{change.name}={change.value}{now}"


def _show_commands(changes: Sequence[VariableChange]) -> None:
    commands = [each.command for each in changes if each.command]
    if not commands:
        typer.echo("\nthe environment is as the preset has it")
        return
    typer.echo("\nnothing was changed. In a shell or a job script:")
    for command in commands:
        typer.echo(f"  {command}")
    values = [f"{each.name}: '{each.value}'" for each in changes if each.step == "set" and not each.is_done]
    if values:
        typer.echo("or in targets.yaml, in the section ssh, ray or sky (k8s: env; Slurm passes the shell's):")
        typer.echo(f"  environment: {{{', '.join(values)}}}")
    typer.echo("? may help: measure with `trimaran bench comm` before and after")
