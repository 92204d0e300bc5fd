"""`trimaran doctor`: checks this machine before a run, or diagnoses a run."""

from typing import Annotated

import typer

from trimaran.app.recipe.options import Json, Settings, complete_fabric, complete_recipe
from trimaran.core import UserError

Recipe = Annotated[
    str | None,
    typer.Option("--recipe", metavar="FILE", autocompletion=complete_recipe,
                 help="Also check whether this recipe's run fits here: memory, disk, checkpoints."),
]  # fmt: skip


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
    fabric: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Compare the environment with the preset of auto, infiniband, roce, efa, tcp or pcie. Nothing is set.",
            autocompletion=complete_fabric,
        ),
    ] = "",
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
        from trimaran.app.machine.fabric_view import show_fabric

        return show_fabric(fabric, several_nodes=nodes > 1, as_json=as_json)
    if bad_nodes or forget_node:
        from trimaran.app.machine.bad_nodes_view import forget_bad_node, show_bad_nodes

        return forget_bad_node(forget_node) if forget_node else show_bad_nodes(as_json=as_json)
    if run:
        from trimaran.app.runs.run_findings import diagnose_run

        return diagnose_run(run, as_json=as_json, against=against)
    if against:
        raise UserError("A019", "--against compares two runs, but only one is named", where="--against",
                        fix=f"name the other one first: trimaran doctor RUN --against {against}")  # fmt: skip
    from trimaran.app.machine.machine_check import MachineCheckOptions, check_machine
    from trimaran.machine.checks.measure_machine import RendezvousOptions

    several = nodes != 1 or node or address
    rendezvous = RendezvousOptions(nodes=nodes, node=node, address=address) if several else None
    options = MachineCheckOptions(recipe=recipe, settings=settings or (), quick=quick, rendezvous=rendezvous)
    return check_machine(options, as_json=as_json)
