"""What a person says about a run on several nodes, and what this machine is called among them."""

import argparse
import platform
import re
from dataclasses import dataclass

import psutil

from trimaran.core import UserError

WAIT_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """How many nodes a run is to have, how few it goes on with, and how long it waits for those that are missing.

    `address` is this node's own on the network that the nodes share: control and gloo use no other interface.
    `ranks` is how many this node has room for; 0 is its equal part of the plan's.
    """

    nodes: int
    min_nodes: int
    address: str
    wait_seconds: float = WAIT_SECONDS
    ranks: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.nodes:
            raise UserError("S024", f"at least {self.min_nodes} of {self.nodes} nodes cannot be", where="--min-nodes",
                            fix="use a number from 1 to that of --nodes")  # fmt: skip
        if not self.address:
            raise UserError("S024", "a run on several nodes wants to know this node's address", where="--address",
                            fix="name the IP address by which the other nodes reach this one")  # fmt: skip

    @property
    def interface(self) -> str:
        """The name of the network interface that has the address; all of 127.0.0.0/8 is the loopback's."""
        same = "127.0.0.1" if self.address.startswith("127.") else self.address
        for name, addresses in psutil.net_if_addrs().items():
            if any(each.address.partition("%")[0] == same for each in addresses):
                return name
        raise UserError("S022", "this machine has no such address", where=f"--address {self.address}",
                        fix="name an address of this machine, as `ip address` shows them")  # fmt: skip

    @property
    def name(self) -> str:
        """This node's name among the others; nodes are put in order by it."""
        return re.sub(r"[^A-Za-z0-9.-]+", "-", f"{platform.node()}-{self.address}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what a run on several nodes wants to know; `node_options_of` reads it."""
    parser.add_argument("--nodes", type=int, default=1, help="how many nodes take part; start this command on each")
    parser.add_argument("--min-nodes", type=int, help="how few to go on with when nodes are lost (default: all)")
    parser.add_argument("--address", default="", help="this node's IP address on the network that the nodes share")
    parser.add_argument("--node-wait", type=float, default=WAIT_SECONDS, help="seconds to wait for missing nodes (300)")
    parser.add_argument("--no-check", action="store_true", help="do not look at this machine first, see the doctor")
    parser.add_argument("--ranks-per-node", type=int, default=0, help="ranks on this node (its part of the plan)")


def node_options_of(flags: argparse.Namespace) -> NodeOptions | None:
    """Return what the flags ask for; None for a run on one machine."""
    if flags.nodes == 1 and not flags.address:
        return None
    return NodeOptions(
        nodes=flags.nodes,
        min_nodes=flags.nodes if flags.min_nodes is None else flags.min_nodes,
        address=flags.address,
        wait_seconds=flags.node_wait,
        ranks=flags.ranks_per_node,
    )
