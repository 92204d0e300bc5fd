"""Measures the TCP link between two nodes of a run, over the channel of one of them, which proves the run's token.

The node that measures counts what it receives, so that what waits in buffers does not count. Both nodes of a pair
measure at the same time, as both directions of a ring are busy at the same time.
"""

import contextlib
import math
import socket
import time

from trimaran.core import Seconds
from trimaran.runs.measured_links import LinkSpeed
from trimaran.runs.wire import ChannelClient, frame

OPERATION = "measure_link"
CONNECT_SECONDS = 5.0
NUM_PINGS = 8
SETTLING_FRACTION = 0.3  # of the time, at its beginning: TCP starts slowly
MAX_SEND_SECONDS = 5.0  # of one measurement, if the other side does not end it
BLOCK_BYTES = 1 << 18
READY, PING, STREAM = b"r", b"p", b"s"


def serve_link(connection: socket.socket) -> None:
    """Answer pings, and then send zeros until the other side has enough. The connection is closed at the end."""
    with connection, contextlib.suppress(OSError):
        connection.settimeout(MAX_SEND_SECONDS)
        connection.sendall(READY)  # the rest of the connection is not made of frames
        while (request := connection.recv(1)) == PING:
            connection.sendall(PING)
        until, zeros = time.monotonic() + MAX_SEND_SECONDS, bytes(BLOCK_BYTES)
        while request == STREAM and time.monotonic() < until:
            connection.sendall(zeros)


def measure_link(address: str, token: str, *, seconds: float) -> LinkSpeed:
    """Return the speed of the link from the node whose channel is at `address`. Raises OSError if there is none."""
    connection, _, authenticator = ChannelClient(address, token, seconds=CONNECT_SECONDS).detach()
    with connection:
        connection.sendall(frame({"op": OPERATION}, authenticator))
        _read_byte(connection, READY)
        round_trip = math.inf
        for _ in range(NUM_PINGS):
            began = time.perf_counter()
            connection.sendall(PING)
            _read_byte(connection, PING)
            round_trip = min(round_trip, time.perf_counter() - began)
        connection.sendall(STREAM)
        rate = _receive_rate(connection, seconds=seconds)
    return LinkSpeed(round_trip=Seconds(round_trip), bytes_per_second=rate)


def _receive_rate(connection: socket.socket, *, seconds: float) -> float:
    """Return how many bytes arrive per second, without those of the first part of the time."""
    began = time.perf_counter()
    settled, end = began + SETTLING_FRACTION * seconds, began + seconds
    block, num_received, counted_from, num_before = bytearray(BLOCK_BYTES), 0, began, 0
    while (now := time.perf_counter()) < end:
        if counted_from == began and now >= settled:
            counted_from, num_before = now, num_received
        connection.settimeout(end - now)
        with contextlib.suppress(TimeoutError):
            received = connection.recv_into(block)
            if not received:
                raise ConnectionError("the other node ended the measurement")
            num_received += received
    num_counted, took = num_received - num_before, time.perf_counter() - counted_from
    if not num_counted:  # a link so slow that nothing arrived in time
        num_counted, took = max(1, num_received), time.perf_counter() - began
    return num_counted / took


def _read_byte(connection: socket.socket, expected: bytes) -> None:
    if connection.recv(1) != expected:
        raise ConnectionError("the other node does not measure links")
