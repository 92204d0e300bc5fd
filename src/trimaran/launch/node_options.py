"""The command-line options of a run on several nodes, and this node's name."""

import argparse
import platform
import re
from dataclasses import dataclass

import psutil

from trimaran.core import UserError

WAIT_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """The number of nodes of a run, the smallest number it continues with, and how long it waits for missing nodes.

    `address` is this node's address on the network that the nodes share; the channel and gloo use only its interface.
    `ranks` is how many ranks this node can hold; 0 means an equal part of the plan's.
    """

    nodes: int
    min_nodes: int
    address: str
    wait_seconds: float = WAIT_SECONDS
    ranks: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.nodes:
            raise UserError("S024", f"{self.min_nodes} of {self.nodes} nodes is not a valid minimum",
                            where="--min-nodes", fix="use a number from 1 to --nodes")  # fmt: skip
        if not self.address:
            raise UserError("S024", "a run on several nodes needs this node's address", where="--address",
                            fix="name the IP address at which the other nodes reach this one")  # fmt: skip

    @property
    def interface(self) -> str:
        """The name of the network interface with the address; all of 127.0.0.0/8 is the loopback interface."""
        address = "127.0.0.1" if self.address.startswith("127.") else self.address
        for name, addresses in psutil.net_if_addrs().items():
            if any(each.address.partition("%")[0] == address for each in addresses):
                return name
        raise UserError("S022", "this machine has no such address", where=f"--address {self.address}",
                        fix="name an address of this machine, as `ip address` lists them")  # fmt: skip

    @property
    def name(self) -> str:
        """This node's name, which is unique in the run; nodes are sorted by it."""
        return re.sub(r"[^A-Za-z0-9.-]+", "-", f"{platform.node()}-{self.address}")


def add_node_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run on several nodes; `parse_node_options` reads them."""
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes; start this command on each")
    parser.add_argument("--min-nodes", type=int, help="continue with this many if nodes are lost (default: all)")
    parser.add_argument("--address", default="", help="this node's IP address on the network that the nodes share")
    parser.add_argument("--node-wait", type=float, default=WAIT_SECONDS, help="seconds to wait for missing nodes (300)")
    parser.add_argument("--no-check", action="store_true", help="skip the check of this machine, see `trimaran doctor`")
    parser.add_argument("--ranks-per-node", type=int, default=0, help="ranks on this node (its part of the plan)")


def parse_node_options(flags: argparse.Namespace) -> NodeOptions | None:
    """Return the options in `flags`; None for a run on one machine."""
    if flags.nodes == 1 and not flags.address:
        return None
    return NodeOptions(
        nodes=flags.nodes,
        min_nodes=flags.nodes if flags.min_nodes is None else flags.min_nodes,
        address=flags.address,
        wait_seconds=flags.node_wait,
        ranks=flags.ranks_per_node,
    )
