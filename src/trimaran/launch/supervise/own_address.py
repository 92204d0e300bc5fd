"""The address of this node that the other nodes reach: the kernel's routes tell which one is used towards them.

A UDP socket that is connected to an address has the source address of its route; nothing is sent.
"""

import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import psutil

from trimaran.core import UserError

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
    candidates = [*_resolve_any(hosts, look_up or resolve, wait_seconds=wait_seconds), *([holder] if holder else [])]
    for address in candidates:
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


def _resolve_any(hosts: Sequence[str], look_up: Callable[[str], list[str]], *, wait_seconds: float) -> list[str]:
    """Return the addresses of those `hosts` that are known; wait until one is. Raises if none is."""
    until = time.monotonic() + wait_seconds
    while not (found := [address for host in hosts for address in look_up(host)]) and hosts:
        if time.monotonic() >= until:
            raise UserError("L020", f"this machine knows no address of {', '.join(hosts)}", where="--head, --peers",
                            fix="name hosts that it can resolve, or IP addresses")  # fmt: skip
        time.sleep(RETRY_SECONDS)
    return found


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
        raise UserError("L020", f"this machine has no default route and several addresses: {listed}",
                        where="--address auto", fix="name another node: --peers HOST; or this node's: --address IP"
                        )  # fmt: skip
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
