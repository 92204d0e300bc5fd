"""Shows the bad-node memory, and removes a node from it."""

import json
import os
import time

import typer

from trimaran.core import UserError, did_you_mean
from trimaran.runs.node_records import add_observation, bad_nodes_file, observe, read_bad_nodes


def show_bad_nodes(*, as_json: bool) -> int:
    """Print the nodes that new runs avoid."""
    path = bad_nodes_file(os.environ)
    bad = read_bad_nodes(path)
    if as_json:
        typer.echo(json.dumps({"file": str(path), "nodes": [each.as_dict() for each in bad.values()]}))
        return 0
    if not bad:
        typer.echo(f"no node is known to be bad ({path})")
    for each in bad.values():
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.expires))
        last = each.observations[-1]
        where = f"; {last.run} {last.incident}".rstrip() if last.run else ""
        typer.echo(f"{each.node}  until {until}: {each.why}{where}")
    return 0


def forget_bad_node(node: str) -> int:
    """Record that a person says the node is good."""
    path = bad_nodes_file(os.environ)
    bad = read_bad_nodes(path)
    if node not in bad:
        what = f"{node} is not known to be bad{did_you_mean(node, bad)}"
        raise UserError("L080", what, where=f"--forget-node {node}",
                        fix="list the bad nodes: trimaran doctor --bad-nodes")  # fmt: skip
    add_observation(path, observe(node, "cleared", "a person says that it is good"))
    typer.echo(f"{node} is not avoided any more")
    return 0
