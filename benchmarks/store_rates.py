"""Prints how many requests a second the supervisor's store answers, and torch's `TCPStore` on the same machine.

    python benchmarks/store_rates.py --clients 1,16,64

Each client is a process that sets a key of 64 bytes and gets it, in turns. The server has a process of its own, whose
CPU time is printed too: on a machine with few cores the clients slow it down. `relayed`: the clients are the ranks of
one node, whose channel, in another process, sends their requests to the server.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe
from statistics import median
from typing import Any

import torch.distributed as dist

from trimaran.launch.supervise.channel import Channel
from trimaran.runs.wire import ChannelClient, split_address
from trimaran.train.process.supervisor_link import TokenStore

TOKEN = "token"
REQUESTS = 16_000  # of all clients together
ROUNDS = 3


def serve(name: str, pipe: Pipe) -> None:
    """Serve until the other side writes twice; answer each time with the CPU time so far."""
    theirs: Any = None
    if name != "TCPStore":
        theirs = Channel("127.0.0.1", TOKEN)
        pipe.send(theirs.address)
    else:
        theirs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        pipe.send(f"127.0.0.1:{theirs.port}")
    for _ in range(2):
        pipe.recv()
        pipe.send(time.process_time())
    os._exit(0)


def relay(address: str, pipe: Pipe) -> None:
    """Relay requests to the server at `address` until the other side writes."""
    channel = Channel("127.0.0.1", TOKEN)
    channel.relay_to(ChannelClient(address, TOKEN, seconds=5.0), attempt=0)
    pipe.send(channel.address)
    pipe.recv()
    os._exit(0)


def connect(name: str, address: str) -> Any:
    host, port = split_address(address)
    if name == "TCPStore":
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
    return TokenStore(address, TOKEN, attempt=0)


def work(make: Callable[[], Any], number: int, requests: int, barrier: Any) -> None:
    store, key = make(), f"k{number}"
    store.set(key, "x" * 64)
    barrier.wait()
    for each in range(requests // 2):
        store.set(key, f"{each:064d}")
        store.get(key)
    barrier.wait()
    os._exit(0)


def measure(name: str, num_clients: int) -> tuple[float, float]:
    """Return the requests a second, and the server's CPU time for one request in microseconds."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(name, theirs))
    server.start()
    address, barrier, requests = ours.recv(), context.Barrier(num_clients + 1), REQUESTS // num_clients
    to_relay, of_relay = context.Pipe()
    if name == "relayed":
        context.Process(target=relay, args=(address, of_relay), daemon=True).start()
        address = to_relay.recv()
    workers = [context.Process(target=work, args=(lambda: connect(name, address), number, requests, barrier))
               for number in range(num_clients)]  # fmt: skip
    for worker in workers:
        worker.start()
    barrier.wait()
    ours.send("begin")
    began, cpu = time.monotonic(), ours.recv()
    barrier.wait()
    seconds = time.monotonic() - began
    ours.send("end")
    cpu = ours.recv() - cpu
    to_relay.send("end")
    for process in (server, *workers):
        process.join()
    return num_clients * requests / seconds, 1e6 * cpu / (num_clients * requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--clients", default="1,16,64")
    for clients in map(int, parser.parse_args().clients.split(",")):
        rows: dict[str, list[tuple[float, float]]] = {"trimaran": [], "relayed": [], "TCPStore": []}
        for _ in range(ROUNDS):
            for name, found in rows.items():  # in turns: the machine's speed changes
                found.append(measure(name, clients))
        answer = {
            name: {
                "requests_per_second": round(median(rate for rate, _ in found)),
                "server_cpu_us": round(median(cpu for _, cpu in found), 1),
            }
            for name, found in rows.items()
        }
        print(json.dumps({"clients": clients} | answer), flush=True)


if __name__ == "__main__":
    main()
