"""A network between namespaces, in user space: delay, loss, rate and cut. This kernel has no netem.

`python -m tests.chaos.wire A B --delay 0.1 --loss 0.05 --rate 10` gives 10.78.0.1 to namespace A and 10.78.0.2 to B,
prints `up` and relays packets until it is killed. SIGUSR1 cuts the network, and restores it again. A line such as
`0.1 0 5` on its standard input changes delay, loss and rate. With more than two namespaces each has a link of its own
to all others, whose rate limits what it sends and what it receives. With `--sites 0,1,0,1` the first and the third are
at one site, the others at another; all between two sites shares one link, with `--between-delay` and `--between-rate`.
"""

import argparse
import fcntl
import heapq
import os
import random
import select
import signal
import stat
import struct
import subprocess
import time
from dataclasses import dataclass, field

ADDRESSES = ("10.78.0.1", "10.78.0.2")
ALL_ADDRESSES = (*ADDRESSES, "10.78.0.3", "10.78.0.4")
DESTINATION = 19  # the byte of an IPv4 packet that ends the address it is sent to
MTU = 9000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000  # of Linux's if_tun.h
QUEUE_BYTES = 256 * 2**10  # queued at a slow end before packets are dropped, as in a router


@dataclass
class End:
    """One end of the network, and the packets that entered here and have not left at another end."""

    fd: int
    in_flight: list[tuple[float, int, bytes]] = field(default_factory=list)
    free: float = 0.0  # when the queue will be empty
    receives: float = 0.0  # until when the end receives what was sent to it
    waiting: int = 0


class Wire:
    def __init__(self, ends: tuple[End, ...], *, delay: float, loss: float, rate: float) -> None:
        self.ends, self.delay, self.loss, self.rate = ends, delay, loss, rate
        self.cut = False
        self.sites: tuple[int, ...] = ()  # of the ends
        self.between_delay, self.between_rate = 0.0, 0.0
        self._between_free: dict[tuple[int, int], float] = {}  # when the queue between two sites will be empty
        self.orders: list[int] = []  # a file descriptor with lines that change the link
        self._count = 0
        self._random = random.Random(0)

    def relay(self) -> None:
        """Relay packets forever."""
        while True:
            due = [end.in_flight[0][0] for end in self.ends if end.in_flight]
            wait = max(0.0, min([*due, time.monotonic() + 1.0]) - time.monotonic())
            readable, _, _ = select.select([end.fd for end in self.ends] + self.orders, [], [], wait)
            if self.orders and self.orders[0] in readable:
                self._reshape()
            for here in self.ends:
                if here.fd in readable:
                    self._take(here)
                self._give(here)

    def _reshape(self) -> None:
        """Change the link as the newest line says: delay, loss and rate. Packets in flight leave as before."""
        lines = os.read(self.orders[0], 4096).decode().splitlines()
        if not lines:
            self.orders = []  # nobody will write more
            return
        self.delay, self.loss, megabits = map(float, lines[-1].split())
        self.rate = megabits * 1e6 / 8
        for end in self.ends:
            end.free, end.receives, end.waiting = 0.0, 0.0, sum(len(packet) for _, _, packet in end.in_flight)

    def _take(self, end: End) -> None:
        now = time.monotonic()
        for _ in range(64):
            try:
                packet = os.read(end.fd, 65536)
            except BlockingIOError:
                return
            full = self.rate and end.waiting + len(packet) > QUEUE_BYTES
            if self.cut or full or self._random.random() < self.loss:
                continue
            end.waiting += len(packet)
            if self.rate:
                end.free = max(end.free, now) + len(packet) / self.rate
            leaves = max(end.free, now)
            target = self._target(end, packet)
            if self.rate and len(self.ends) > 2 and target is not None:  # several may send to one
                target.receives = leaves = max(leaves, target.receives + len(packet) / self.rate)
            if target is not None and self.sites:
                crossed = self._cross(end, target, leaves, len(packet))
                if crossed is None:
                    end.waiting -= len(packet)
                    continue
                leaves = crossed
            self._count += 1
            heapq.heappush(end.in_flight, (leaves + self.delay, self._count, packet))

    def _cross(self, here: End, there: End, leaves: float, size: int) -> float | None:
        """Return when a packet has passed the link between sites; None if its queue is full."""
        ends = [*self.ends]
        way = self.sites[ends.index(here)], self.sites[ends.index(there)]
        if way[0] == way[1]:
            return leaves
        begins = max(self._between_free.get(way, 0.0), leaves)
        if self.between_rate:
            if (begins - leaves) * self.between_rate > QUEUE_BYTES:
                return None
            begins += size / self.between_rate
            self._between_free[way] = begins
        return begins + self.between_delay

    def _target(self, here: End, packet: bytes) -> End | None:
        """Return the end that a packet is sent to; None if there is none, as for those of IPv6."""
        if len(self.ends) == 2:
            return self.ends[1] if here is self.ends[0] else self.ends[0]
        number = packet[DESTINATION] - 1 if len(packet) > DESTINATION and packet[0] >> 4 == 4 else -1
        return self.ends[number] if 0 <= number < len(self.ends) else None

    def _give(self, here: End) -> None:
        while here.in_flight and here.in_flight[0][0] <= time.monotonic():
            _, _, packet = heapq.heappop(here.in_flight)
            here.waiting -= len(packet)
            there = self._target(here, packet)
            if not self.cut and there is not None:
                try:
                    os.write(there.fd, packet)
                except OSError:
                    continue  # the other end is down or full


def open_end(name: str, namespace: str, address: str) -> End:
    """Create a TUN device in `namespace`; packets that are sent there are read here."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    for command in (
        f"ip link set {name} netns {namespace}",
        f"ip -n {namespace} addr add {address}/24 dev {name}",
        f"ip -n {namespace} link set {name} mtu {MTU} txqueuelen 1000 up",
    ):
        subprocess.run(command.split(), check=True)
    return End(fd)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("namespaces", nargs="+")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds, each way")
    parser.add_argument("--loss", type=float, default=0.0, help="fraction of packets")
    parser.add_argument("--rate", type=float, default=0.0, help="Mbit/s each way; 0: no limit")
    parser.add_argument("--sites", default="", help="the site of each namespace, such as 0,1,0,1")
    parser.add_argument("--between-delay", type=float, default=0.0, help="seconds between sites, each way")
    parser.add_argument("--between-rate", type=float, default=0.0, help="Mbit/s between two sites; 0: no limit")
    flags = parser.parse_args()
    names = [f"{namespace[:12]}w" for namespace in flags.namespaces]
    placed = zip(names, flags.namespaces, ALL_ADDRESSES, strict=False)
    wire = Wire(
        tuple(open_end(*each) for each in placed), delay=flags.delay, loss=flags.loss, rate=flags.rate * 1e6 / 8
    )

    wire.sites = tuple(map(int, filter(None, flags.sites.split(","))))
    wire.between_delay, wire.between_rate = flags.between_delay, flags.between_rate * 1e6 / 8

    def toggle(*_: object) -> None:
        wire.cut = not wire.cut

    signal.signal(signal.SIGUSR1, toggle)
    wire.orders = [0] if stat.S_ISFIFO(os.fstat(0).st_mode) else []
    print("up", flush=True)
    wire.relay()


if __name__ == "__main__":
    main()
