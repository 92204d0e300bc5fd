"""Writes what a coordinator sees of nodes to the bad-node memory (`runs/bad_nodes.py`)."""

import logging
import os
from collections.abc import Iterable, Sequence

from trimaran.core import UserError
from trimaran.launch.supervise.node import Node, NodeLost
from trimaran.runs import RunDirectory
from trimaran.runs.bad_nodes import Kind, add_observation, bad_nodes_file, observe

log = logging.getLogger(__name__)

# What the check of a node found, if a part of the node is broken: GPU memory errors, a network card that is down, wrong
# results of an all-reduce, a node that is slow with every partner. All other codes may be a person's mistake.
HARDWARE_CODES = frozenset({"H003", "H006", "H016", "H018"})
MAX_LOST_FRACTION = 0.5  # of all nodes; if more are lost at once, the network or the scheduler is the reason


def note_lost_nodes(run: RunDirectory, nodes: Sequence[Node], lost: Iterable[NodeLost], *, incident: str) -> None:
    """Note the nodes whose supervisor is gone. One loss makes no node bad: it may be a preemption."""
    hosts = {node.name: getattr(node, "host", "") for node in nodes}  # empty for the coordinator's own node
    gone = [each for each in lost if hosts.get(each.node)]
    if 0 < len(gone) <= MAX_LOST_FRACTION * len(nodes):
        for each in gone:
            _note(run, hosts[each.node], "lost", each.what, incident=incident)


def note_unfit_node(run: RunDirectory, host: str, error: UserError) -> None:
    """Note a node whose check found a broken part."""
    if error.code in HARDWARE_CODES:
        _note(run, host, "hardware", f"{error.code}: {error.what}", incident="")


def _note(run: RunDirectory, host: str, kind: Kind, why: str, *, incident: str) -> None:
    path = bad_nodes_file(os.environ)
    try:
        add_observation(path, observe(host, kind, why, run=str(run.location), incident=incident))
    except OSError as error:
        log.warning("the bad-node memory %s cannot be written: %s", path, error)
