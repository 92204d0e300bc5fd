"""`trimaran viz`: a picture that explains how a model is split, with the numbers of a plan or a run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from trimaran.app import Json, Settings, complete_cluster, complete_model_or_recipe, complete_run, starting


def complete_view(incomplete: str) -> list[str]:
    from trimaran.ui.viz.catalogue import SHORT_NAMES, VIEWS

    return starting([*SHORT_NAMES, *VIEWS], incomplete)


ViewName = Annotated[
    str | None,
    typer.Argument(metavar="NAME", show_default=False, help="A view. [default: list them]",
                   autocompletion=complete_view),
]  # fmt: skip
What = Annotated[
    str | None,
    typer.Argument(metavar="MODEL|RECIPE", show_default=False, help="The same as --plan.",
                   autocompletion=complete_model_or_recipe),
]  # fmt: skip
PlanFile = Annotated[
    str | None,
    typer.Option("--plan", metavar="FILE", help="A recipe, a model, or a plan.json. [default: an example]",
                 autocompletion=complete_model_or_recipe),
]  # fmt: skip
RunName = Annotated[
    str | None,
    typer.Option("--run", metavar="NAME", help="A run, to see what it measured.", autocompletion=complete_run),
]
ClusterName = Annotated[
    str | None,
    typer.Option(metavar="C", help="8xH100, or a YAML file. [default: the plan's]", autocompletion=complete_cluster),
]
With = Annotated[
    list[str] | None, typer.Option("--with", metavar="CONTROL=VALUE", help="Set a control of the view. Repeatable.")
]
CommFile = Annotated[
    Path | None,
    typer.Option("--comm", metavar="FILE", help="For collectives: a result of `trimaran bench comm --out FILE`."),
]
HtmlFile = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write the view as one HTML page, with its figures.")
]


def viz(
    name: ViewName = None,
    what: What = None,
    plan: PlanFile = None,
    run: RunName = None,
    cluster: ClusterName = None,
    controls: With = None,
    comm: CommFile = None,
    html: HtmlFile = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Show a view: what fits, how plans compare, what each rank holds, computes and sends.

    Each is explained with a formula and your numbers, simulated by the cost model, and, with a run, shown live.

    \b
    trimaran viz need llama-3.1-8b --cluster 8xH100
    trimaran viz pipeline --with ranks=8 --with schedule=zero-bubble --html pipeline.html
    trimaran viz life --run stdlib-tiny
    trimaran viz zero --run stdlib-tiny --json
    """
    import json

    from trimaran.app import open_console
    from trimaran.ui.viz.catalogue import SHORT_NAMES, build_view, find_view
    from trimaran.ui.viz.figures import view_as_dict
    from trimaran.ui.viz.viz_request import read_subject
    from trimaran.ui.viz.viz_view import list_views, show_view

    if name is None:
        names = {short: module.NAME for short, module in SHORT_NAMES.items()}
        typer.echo(json.dumps(names)) if as_json else list_views(open_console())
        return
    find_view(name)
    if what is not None and plan is not None:
        from trimaran.core import UserError

        raise UserError("V004.view-plan-two", where=f"{what}, --plan {plan}")
    view = build_view(name, read_subject(what or plan, run, cluster, settings or [], controls or [], comm))
    if html is not None:
        from trimaran.ui.report.markup import write_page
        from trimaran.ui.report.view_page import view_page

        write_page(html, view_page(view), option="--html")
    if as_json:
        answer: dict[str, Any] = view_as_dict(view)
        typer.echo(json.dumps(answer))
    elif html is not None:
        typer.echo(f"written: {html}")
    else:
        show_view(view, open_console())
