"""The command-line options of a run on several nodes: this node's name, its address and the run's token.

The address is the one that the other nodes reach: the kernel's routes tell which one is used towards them. A UDP socket
that is connected to an address has the source address of its route; nothing is sent. The token of a run whose nodes
have no disk in common comes from the environment or a file, never from an argument.
"""

import argparse
import contextlib
import ipaddress
import platform
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from trimaran.core import UserError, read_regular_text
from trimaran.runs import LeaseHolder, LeaseWatch, RunDirectory, new_token, run_token, split_address, write_once

RESOLVE_SECONDS = 60.0  # until the names of nodes that have just started are known
RETRY_SECONDS = 0.5
UNUSED_PORT = 9
ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # addresses for documentation, to which only the default route leads


def find_own_address(
    hosts: Sequence[str],
    *,
    holder: str = "",
    wait_seconds: float = RESOLVE_SECONDS,
    look_up: Callable[[str], list[str]] | None = None,
    default: Callable[[], str] | None = None,
) -> str:
    """Return this node's address on the network of `hosts`, of the lease's `holder`, or of the default route.

    `hosts` are names or addresses of nodes, perhaps of this one. Loopback is the answer only if an address of it was
    named, or if this machine has no other. Raises if `hosts` are unknown, or if the answer is not clear. `look_up`
    returns the addresses of a name, and `default` the answer without hosts: by default `resolve` and `default_address`.
    """
    for host in hosts:
        if is_loopback(host):
            return source_towards(host) or host
    look_up, until = look_up or resolve, time.monotonic() + wait_seconds
    while not (found := [address for host in hosts for address in look_up(host)]) and hosts:
        if time.monotonic() >= until:
            raise UserError("L020.machine-knows", where="--head, --peers", hosts=", ".join(hosts))
        time.sleep(RETRY_SECONDS)
    for address in [*found, *([holder] if holder else [])]:
        if (source := source_towards(address)) and (not is_loopback(source) or address == holder):
            return source
    return (default or default_address)()


def source_towards(address: str) -> str:
    """Return the source address of the route to an IP address; "" if there is no route, or only a link-local one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, UNUSED_PORT))
        source = str(probe.getsockname()[0])
        return "" if ipaddress.ip_address(source.partition("%")[0]).is_link_local else source
    return ""


def resolve(host: str) -> list[str]:
    """Return the addresses of a host name or address; none if it is unknown."""
    try:
        found = socket.getaddrinfo(host, UNUSED_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address; a name is not."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def default_address(
    elsewhere: Sequence[str] = ELSEWHERE, interfaces: Callable[[], Iterable[tuple[str, str]]] | None = None
) -> str:
    """Return the address of the default route, else that of the only interface that is up, else loopback.

    The default route leads to `elsewhere`. `interfaces` returns names and addresses, by default `interface_addresses`.
    """
    for address in elsewhere:
        if (source := source_towards(address)) and not is_loopback(source):
            return source
    found = dict((interfaces or interface_addresses)())
    if len(found) > 1:
        listed = ", ".join(f"{address} ({name})" for name, address in found.items())
        raise UserError("L020.machine-no-default", where="--address auto", listed=listed)
    return next(iter(found.values()), "127.0.0.1")


def interface_addresses() -> Iterator[tuple[str, str]]:
    """Yield each interface that is up, without loopback, and its first address that is not link-local."""
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family in (socket.AF_INET, socket.AF_INET6) and name in states and states[name].isup:
                address = ipaddress.ip_address(each.address.partition("%")[0])
                if not address.is_loopback and not address.is_link_local:
                    yield name, str(address)
                    break


RUN_TOKEN = "TRIMARAN_RUN_TOKEN"
MIN_CHARACTERS = 16
TOKEN_SECONDS = 30.0  # until the head has written the file, which may be in a home directory that the nodes share
POLL_SECONDS = 0.2


def given_token(environment: MutableMapping[str, str], file: Path | None, *, is_head: bool) -> str:
    """Return the token that this node was given; "" if none. The head creates `file` if it does not exist.

    The variable is removed from `environment`: ranks get the token in another way.
    """
    token = environment.pop(RUN_TOKEN, "").strip()
    where = RUN_TOKEN
    if not token and file is not None:
        where = f"--token-file {file}"
        if is_head and not file.exists():
            write_once(file, new_token() + "\n")
        until = time.monotonic() + TOKEN_SECONDS
        while not file.exists() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        try:
            if file.stat().st_mode & 0o007:
                raise UserError("L023.other-users", where=where, file=file)
            token = read_regular_text(file, follow_links=True).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError("L023.token-file", where=where, error=error) from None
    if token and len(token) < MIN_CHARACTERS:
        raise UserError("L023.run-token-shorter", where=where, min_characters=MIN_CHARACTERS)
    return token


def needed_token(token: str, run: RunDirectory) -> str:
    """Return the token, or that which an earlier start of this node has kept. Raises if there is none."""
    if token:
        return token
    if (run.lease / "token").is_file():
        return run_token(run)
    raise UserError("L023.node-no-token", where=f"--token-file, {RUN_TOKEN}")


def keep_token(run: RunDirectory, token: str) -> None:
    """Make `token` the run's token in its directory."""
    if token and (not (run.lease / "token").is_file() or run_token(run) != token):
        run.lease.mkdir(mode=0o700, exist_ok=True)
        (run.lease / "token").unlink(missing_ok=True)
        write_once(run.lease / "token", token + "\n")
        run_token(run)  # refuses a folder that others can read


WAIT_SECONDS = 300.0
HEAD_PORT = 29400
AUTO = "auto"  # as an address: that of the route towards the other nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """How a node takes part in a run on several nodes."""

    nodes: int  # the most that take part
    min_nodes: int  # the smallest number that the run continues with
    address: str  # of this node on the network that the nodes share; `auto`: see `with_own_address`
    wait_seconds: float = WAIT_SECONDS  # for missing nodes
    ranks: int = 0  # that this node can hold; 0: an equal part of the plan's
    node_name: str = ""
    peers: tuple[str, ...] = ()  # nodes towards which the route is asked
    head: str = ""  # `HOST` or `HOST:PORT` of the node that coordinates, with `own_disk`
    own_disk: bool = False  # the nodes have no disk in common
    start_nodes: int = 0  # that the first start needs, 0: all; others may join later

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.nodes:
            raise UserError("S024.nodes-not-valid", where="--min-nodes", min_nodes=self.min_nodes, nodes=self.nodes)
        if not self.min_nodes <= self.num_at_start <= self.nodes:
            raise UserError("S024.nodes-not-valid-number", where="--start-nodes", start_nodes=self.start_nodes)
        if self.own_disk and not self.head:
            raise UserError("L022.without-shared-disk", where="--own-disk")

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
        raise UserError("S022.machine-no", where=f"--address {self.address}")

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
        raise UserError("L022.not-host-port", where="--head", text=text)
    return host, port


def with_own_address(options: NodeOptions, run: RunDirectory | None = None) -> NodeOptions:
    """Return the options with this node's address in place of `auto`. Raises if it cannot be told."""
    if options.address != AUTO:
        return options
    holder = LeaseWatch(run).poll() if run else None
    coordinator = split_address(holder.address)[0] if isinstance(holder, LeaseHolder) and holder.address else ""
    wait_seconds = min(RESOLVE_SECONDS, options.wait_seconds)
    return replace(options, address=find_own_address(options.peers, holder=coordinator, wait_seconds=wait_seconds))
