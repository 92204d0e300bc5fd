"""`trimaran doctor`: checks this machine before a run, or diagnoses a run."""

import json
import os
import time
from dataclasses import asdict, replace
from typing import Annotated

import typer

from trimaran.app.recipe.options import Json, Settings, complete_fabric, complete_recipe
from trimaran.app.show.text_chart import GREEN, ORANGE, RED
from trimaran.core import EXIT_DONE, UserError, did_you_mean

Recipe = Annotated[
    str | None,
    typer.Option("--recipe", metavar="FILE", autocompletion=complete_recipe,
                 help="Also check whether this recipe's run fits here: memory, disk, checkpoints."),
]  # fmt: skip
FABRIC_HELP = "Compare the environment with the preset of auto, infiniband, roce, efa, tcp or pcie. Nothing is set."
MARKS = {"set": ("+", GREEN), "unset": ("-", RED), "try": ("?", ORANGE)}


def doctor(
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="A run. [default: this machine]")] = "",
    recipe: Recipe = None,
    settings: Settings = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only instant checks: nothing is measured.")] = False,
    nodes: Annotated[int, typer.Option(help="Check this many nodes together: start it on each of them.")] = 1,
    node: Annotated[int, typer.Option(help="Index of this node, from 0.")] = 0,
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="Rendezvous address: node 0, a free port.")] = "",
    against: Annotated[str, typer.Option(metavar="RUN", help="A run of the same recipe on fewer ranks.")] = "",
    bad_nodes: Annotated[bool, typer.Option("--bad-nodes", help="List the nodes that new runs avoid.")] = False,
    forget_node: Annotated[str, typer.Option(metavar="NODE", help="Do not avoid this node any more.")] = "",
    fabric: Annotated[str, typer.Option(metavar="NAME", help=FABRIC_HELP, autocompletion=complete_fabric)] = "",
    as_json: Json = False,
) -> int:
    """Check this machine before a run, or say what is wrong with a run and how to fix it.

    Exit codes: 0 no check fails; 2 a check fails.

    \b
    trimaran doctor
    trimaran doctor --recipe recipes/stdlib-tiny.yaml --set cluster=2xcpu
    srun trimaran doctor --nodes $SLURM_NNODES --node $SLURM_NODEID --address $(hostname):29400
    trimaran doctor runs/stdlib-tiny
    trimaran doctor runs/eight-ranks --against runs/one-rank
    trimaran doctor --bad-nodes
    trimaran doctor --fabric auto
    """
    if fabric:
        return show_fabric(fabric, several_nodes=nodes > 1, as_json=as_json)
    if bad_nodes or forget_node:
        from trimaran.runs.node_records import add_observation, bad_nodes_file, observe, read_bad_nodes

        path = bad_nodes_file(os.environ)
        bad = read_bad_nodes(path)
        if forget_node:
            if forget_node not in bad:
                raise UserError(
                    "L080.not-known-bad",
                    where=f"--forget-node {forget_node}",
                    forget_node=forget_node,
                    guess=did_you_mean(forget_node, bad),
                )
            add_observation(path, observe(forget_node, "cleared", "a person says that it is good"))
            typer.echo(f"{forget_node} is not avoided any more")
        elif as_json:
            typer.echo(json.dumps({"file": str(path), "nodes": [each.as_dict() for each in bad.values()]}))
        elif not bad:
            typer.echo(f"no node is known to be bad ({path})")
        else:
            for each in bad.values():
                until = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.expires))
                last = each.observations[-1]
                where = f"; {last.run} {last.incident}".rstrip() if last.run else ""
                typer.echo(f"{each.node}  until {until}: {each.why}{where}")
        return EXIT_DONE
    if run:
        from trimaran.app.runs.run_findings import diagnose_run

        return diagnose_run(run, as_json=as_json, against=against)
    if against:
        raise UserError("A019.against-compares-two", where="--against", against=against)
    from trimaran.app.machine.machine_check import check_machine
    from trimaran.machine.checks.measure_machine import RendezvousOptions

    several = nodes != 1 or node or address
    rendezvous = RendezvousOptions(nodes=nodes, node=node, address=address) if several else None
    return check_machine(recipe, settings or (), rendezvous, quick=quick, as_json=as_json)


def show_fabric(name: str, *, several_nodes: bool, as_json: bool) -> int:
    """Print how the environment differs from the preset of the fabric `name`, or of this machine's (`auto`)."""
    from rich.table import Table
    from rich.text import Text

    from trimaran.app.show.clean_console import open_console
    from trimaran.machine import detect
    from trimaran.machine.checks.fabric_presets import check_fabric, load_presets, preset_changes, read_fabric
    from trimaran.machine.checks.software import harmful, misspelt, useless, wrong_algorithms

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
    what = load_presets()[facts.fabric]["what"]
    cards = f"; cards {', '.join(facts.cards)}" if facts.cards else ""
    headline = f"{facts.fabric}: {what}{cards}" + (f"; interface {facts.interface}" if facts.interface else "")
    console.print(Text(headline, style="bold"))
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style="dim")
    for each in changes:
        if each.step == "unset" and each.now is None:
            continue  # as it should be, and nobody asked
        mark, style = ("=", "dim") if each.is_done else MARKS[each.step]
        text = f"{each.name}={each.value}" + (f" (now {each.now})" if each.now not in (None, each.value) else "")
        text = f"{each.name}={each.now}" if each.step == "unset" else text
        table.add_row(Text(mark, style=style), Text(text, style=style), each.why)
    console.print(table)
    for each in problems:
        console.print(Text(f"! {each.what}; {each.fix}", style=RED), soft_wrap=True)
    changes = [each for each in changes if each.step != "try"]
    commands = [each.command for each in changes if each.command]
    if not commands:
        typer.echo("\nthe environment is as the preset has it")
        return EXIT_DONE
    typer.echo("\nnothing was changed. In a shell or a job script:")
    for command in commands:
        typer.echo(f"  {command}")
    values = [f"{each.name}: '{each.value}'" for each in changes if each.step == "set" and not each.is_done]
    if values:
        typer.echo("or in targets.yaml, in the section ssh, ray or sky (k8s: env; Slurm passes the shell's):")
        typer.echo(f"  environment: {{{', '.join(values)}}}")
    typer.echo("? may help: measure with `trimaran bench comm` before and after")
    return EXIT_DONE
