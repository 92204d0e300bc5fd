"""`trimaran plugins`: lists what installed packages add, and what is wrong with it."""

import json
from typing import Any

import typer

from trimaran.app.recipe.options import Json
from trimaran.core import EXIT_DONE, EXIT_USER, UserError
from trimaran.core.plugins import KINDS, Plugin, installed_plugins, load


def plugins(as_json: Json = False) -> int:
    """List the plug-ins of installed packages: kind, name, package, version, and whether each can be loaded.

    Each is imported to find out. One that cannot be used is left out wherever it would be used, and nothing else.

    Exit codes: 0 all can be loaded; 2 one cannot.

    \b
    trimaran plugins
    trimaran plugins --json
    """
    found = [_checked(each) for kind in KINDS for each in installed_plugins(kind)]
    failed = [each for each in found if each["error"]]
    if as_json:
        kinds = {name: {"group": kind.group, "contract": kind.contract} for name, kind in KINDS.items()}
        typer.echo(json.dumps({"plugins": found, "failed": len(failed), "kinds": kinds}))
        return EXIT_USER if failed else EXIT_DONE
    if not found:
        typer.echo("No plug-ins are installed. docs/guides/plugins.md shows how to write one.")
    else:
        _print(found)
    for each in failed:
        error = each["error"]
        typer.echo(f"{error['code']}: {error['what']}\n  where: {error['where']}\n  fix:   {error['fix']}", err=True)
    return EXIT_USER if failed else EXIT_DONE


def _checked(plugin: Plugin) -> dict[str, Any]:
    error: dict[str, Any] | None = None
    try:
        load(plugin)
    except UserError as found:
        error = found.as_dict()
    return plugin.as_dict() | {"target": plugin.target, "loaded": error is None, "error": error}


def _print(found: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from trimaran.app.show.clean_console import open_console

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for column in ("kind", "name", "package", "version", "state"):
        table.add_column(column, no_wrap=column != "state")
    for each in found:
        state = "loaded" if each["loaded"] else "left out"
        table.add_row(each["kind"], each["name"], each["distribution"], each["version"], state)
    open_console().print(table)
