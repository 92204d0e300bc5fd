"""The command-line options of a run on several nodes, and this node's name."""

import argparse
import platform
import re
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from trimaran.core import UserError
from trimaran.launch.supervise.own_address import RESOLVE_SECONDS, find_own_address, is_loopback, resolve
from trimaran.runs import RunDirectory
from trimaran.runs.lease import LeaseHolder, LeaseWatch
from trimaran.runs.wire import split_address

WAIT_SECONDS = 300.0
HEAD_PORT = 29400
AUTO = "auto"  # as an address: that of the route towards the other nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """The number of nodes of a run, the smallest number it continues with, and how long it waits for missing nodes.

    `nodes` are the most that take part. The first start needs `start_nodes` of them (0: all); others may join later.
    `address` is this node's address on the network that the nodes share; the channel and gloo use only its interface.
    `auto` has to be replaced, see `with_own_address`; `peers` are the nodes towards which the route is asked.
    `ranks` is how many ranks this node can hold; 0 means an equal part of the plan's. `own_disk`: the nodes have no
    disk in common, and the one at `head`, `HOST` or `HOST:PORT`, coordinates.
    """

    nodes: int
    min_nodes: int
    address: str
    wait_seconds: float = WAIT_SECONDS
    ranks: int = 0
    node_name: str = ""
    peers: tuple[str, ...] = ()
    head: str = ""
    own_disk: bool = False
    start_nodes: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.nodes:
            raise UserError("S024", f"{self.min_nodes} of {self.nodes} nodes is not a valid minimum",
                            where="--min-nodes", fix="use a number from 1 to --nodes")  # fmt: skip
        if not self.min_nodes <= self.num_at_start <= self.nodes:
            raise UserError("S024", f"{self.start_nodes} nodes are not a valid number to start with",
                            where="--start-nodes", fix="use a number from --min-nodes to --nodes")  # fmt: skip
        if self.own_disk and not self.head:
            raise UserError("L022", "without a shared disk every node has to know the one that coordinates",
                            where="--own-disk", fix="name it on all nodes: --head HOST:PORT")  # fmt: skip

    @property
    def num_at_start(self) -> int:
        """How many nodes the first start waits for."""
        return self.start_nodes or self.nodes

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
    def is_head(self) -> bool:
        """Whether this node, whose own address is known, is the one that `head` names."""
        named = resolve(split_head(self.head)[0])
        # A machine often knows its own name as a loopback address, at which no other node could reach it.
        is_own_name = bool(named) and all(map(is_loopback, named)) and not is_loopback(self.address)
        return self.address in named or is_own_name

    @property
    def head_address(self) -> str:
        """The address of the head's channel, `host:port`."""
        host, port = split_head(self.head)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def name(self) -> str:
        """This node's name, which is unique in the run; nodes are sorted by it."""
        return re.sub(r"[^A-Za-z0-9.-]+", "-", self.node_name or f"{platform.node()}-{self.address}")


def add_node_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run on several nodes; `parse_node_options` reads them."""
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes; start this command on each")
    parser.add_argument("--min-nodes", type=int, help="continue with this many if nodes are lost (all)")
    parser.add_argument(
        "--start-nodes",
        type=int,
        default=0,
        metavar="N",
        help="start as soon as this many nodes are there, and grow when others join (all)",
    )
    parser.add_argument(
        "--address",
        default="",
        help="this node's IP address on the network that the nodes share; auto, the default with --nodes, finds it by "
        "the route to --head, --peers, the node that coordinates, or the default route",
    )
    parser.add_argument(
        "--head",
        default="",
        metavar="HOST[:PORT]",
        help="a node that --address=auto asks the route to; with --own-disk, the one that coordinates (port 29400)",
    )
    parser.add_argument(
        "--own-disk",
        action="store_true",
        help="the nodes have no disk in common: RUN is on this node's own disk, and --head coordinates",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="with --own-disk: a file with the run's token, which the head creates if it does not exist "
        "(or the environment variable TRIMARAN_RUN_TOKEN)",
    )
    parser.add_argument("--peers", default="", metavar="HOST,HOST", help="further nodes that it asks the route to")
    parser.add_argument("--node-name", default="", help="unique name of this node (default: its host name and address)")
    parser.add_argument("--node-wait", type=float, default=WAIT_SECONDS, help="seconds to wait for missing nodes (300)")
    parser.add_argument("--no-check", action="store_true", help="skip the check of this machine, see `trimaran doctor`")
    parser.add_argument("--ranks-per-node", type=int, default=0, help="ranks on this node (its part of the plan)")


def parse_node_options(flags: argparse.Namespace) -> NodeOptions | None:
    """Return the options in `flags`; None for a run on one machine."""
    if flags.nodes == 1 and not flags.address and not flags.own_disk:
        return None
    head = flags.head.strip()
    near = (split_head(head)[0] if head else "", *flags.peers.split(","))
    return NodeOptions(
        nodes=flags.nodes,
        min_nodes=(flags.start_nodes or flags.nodes) if flags.min_nodes is None else flags.min_nodes,
        address=flags.address or AUTO,
        wait_seconds=flags.node_wait,
        ranks=flags.ranks_per_node,
        node_name=flags.node_name,
        peers=tuple(filter(None, (each.strip() for each in near))),
        head=head,
        own_disk=flags.own_disk,
        start_nodes=flags.start_nodes,
    )


def split_head(text: str) -> tuple[str, int]:
    """Return host and port of `HOST`, `HOST:PORT`, an IPv6 address, or one in brackets with a port."""
    named = re.fullmatch(r"\[(.+)\](?::(\d{1,5}))?|([^:]+)(?::(\d{1,5}))?|([^:\[\]]*(?::[^:\[\]]*){2,})", text)
    host = named and (named[1] or named[3] or named[5])
    port = int((named and (named[2] or named[4])) or HEAD_PORT)
    if not host or not 0 < port < 2**16:
        raise UserError("L022", f"'{text}' is not a host and a port", where="--head",
                        fix="write HOST, HOST:PORT or [IPV6]:PORT")  # fmt: skip
    return host, port


def with_own_address(options: NodeOptions, run: RunDirectory | None = None) -> NodeOptions:
    """Return the options with this node's address in place of `auto`. Raises if it cannot be told."""
    if options.address != AUTO:
        return options
    holder = LeaseWatch(run).poll() if run else None
    coordinator = split_address(holder.address)[0] if isinstance(holder, LeaseHolder) and holder.address else ""
    wait_seconds = min(RESOLVE_SECONDS, options.wait_seconds)
    return replace(options, address=find_own_address(options.peers, holder=coordinator, wait_seconds=wait_seconds))
