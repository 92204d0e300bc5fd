"""Simulates a run on up to 1,024 nodes against the real control plane, and prints one line for each number of nodes.

The coordinator is real: the supervisor, its channel, the lease and the run directory. The nodes are light clients of
the real protocol (`control_plane_clients.py`): each sends the messages of a node, and those with the requests that its
ranks make at their start. Nothing is trained. One run: the nodes connect and the ranks join (`form`), 10 s of
heartbeats (`steady`), 1 % of the nodes fall silent and others take their place (`loss`), the coordinator is killed and
another node takes over (`leader`), and the run is asked to stop (`stop`).

    python -m benchmarks.control_plane --nodes 8,32,128,512,1024 --ranks-per-node 8

The clients share the machine's cores with the coordinator, so its CPU time says more than the seconds. `load` is the
machine's load average at the end: with nothing else running it is near 2.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from benchmarks.control_plane_clients import NUM_CLIENTS, STEP_SECONDS, Fleet, Options

from trimaran.core import EXIT_AGAIN, Mesh, Plan, parse_recipe
from trimaran.launch.supervise.channel import Channel
from trimaran.launch.supervise.early_supervisor import Signals
from trimaran.launch.supervise.node import AttemptSpec, NodeEvent, RankEnded
from trimaran.launch.supervise.node_options import NodeOptions
from trimaran.launch.supervise.remote_node_group import RemoteNodeGroup
from trimaran.launch.supervise.supervisor import Supervisor
from trimaran.runs import Heartbeat, RunDirectory, create_run, lease
from trimaran.runs.run_records import read_attempts

STEADY_SECONDS = 10.0
LIMIT_SECONDS = 900.0


class OwnNode:
    """The coordinator's own node. Its ranks' requests come from the first client process."""

    def __init__(self, run: RunDirectory, name: str, num_ranks: int) -> None:
        self.name, self.num_ranks, self._run = name, num_ranks, run
        self._ranks, self._events, self._since = range(0), list[NodeEvent](), 0.0

    def start(self, spec: AttemptSpec) -> None:
        self._ranks, self._since = range(spec.first_rank, spec.first_rank + spec.num_ranks), time.monotonic()
        self._run_events = spec.attempt

    def poll(self) -> list[NodeEvent]:
        events, self._events = self._events, []
        return events

    def heartbeats(self) -> dict[int, Heartbeat]:
        now = time.monotonic()
        step = int((now - self._since) / STEP_SECONDS) + 1
        return {rank: Heartbeat(section="step", step=step, entered=now, alive=now, answered=0) for rank in self._ranks}

    def collect_reports(self, folder: Path, *, seconds: float, gently: bool = False) -> None: ...

    def request_stop(self) -> None:
        for rank in self._ranks:
            event = {
                "kind": "stop",
                "rank": rank,
                "step": 0,
                "time": time.time(),
                "attempt": self._run_events,
                "data": {},
            }
            with self._run.events(rank).open("ab") as file:
                file.write(json.dumps(event).encode() + b"\n")
        self._events = [RankEnded(rank=rank, code=EXIT_AGAIN, time=time.monotonic()) for rank in self._ranks]

    def kill(self) -> None:
        self._ranks = range(0)


def coordinate(options: Options, number: int) -> None:
    """Coordinate the run with the real supervisor, once the lease is free. The second coordinator is a standby."""
    run = RunDirectory(Path(options.run))
    if number:
        lease.machine_id = lambda: f"machine {number}"  # so that it must wait until the lease expires
    token = lease.run_token(run)
    channel = Channel("127.0.0.1", token, own_node=f"node-00000-{number}")
    node_options = NodeOptions(
        nodes=options.nodes, min_nodes=options.nodes, address="127.0.0.1", wait_seconds=LIMIT_SECONDS
    )
    agent: Any = SimpleNamespace(run=run, node_options=node_options, token=token, channel=channel, per_node=frozenset(),
                                 node=OwnNode(run, f"node-00000-{number}", options.ranks_per_node),
                                 environment=lambda plan: {})  # fmt: skip
    watch = lease.LeaseWatch(run)
    while isinstance(term := watch.poll(), lease.LeaseHolder):
        time.sleep(0.05)
    held = lease.claim_term(run, term, address=channel.address, shared=True)
    assert held is not None
    with held:
        nodes = RemoteNodeGroup(agent, held, Signals(), formed=bool(number))
        signals = Signals()
        code = Supervisor(run, nodes, signals).supervise().code
        nodes.dismiss(code)
    channel.close()
    sys.exit(code)


class Measured:
    """A process of the coordinator: its CPU time and memory."""

    def __init__(self, process: Any) -> None:
        self.process, self._known = process, psutil.Process(process.pid)

    def cpu_seconds(self) -> float:
        times = self._known.cpu_times()
        return times.user + times.system

    def mebibytes(self) -> float:
        return self._known.memory_info().rss / 2**20


class Driver:
    """Runs the phases of one simulated run and measures them."""

    def __init__(self, options: Options, *, only_form: bool = False) -> None:
        self.options, self._only_form = options, only_form
        self.world_size = options.nodes * options.ranks_per_node
        context = multiprocessing.get_context("fork")
        self.run = make_run(Path(options.run), self.world_size, options.nodes)
        self._context, self.row = context, {"nodes": options.nodes, "ranks": self.world_size}
        self.leader = self._start_coordinator(0)
        wait_until(lambda: lease.read_holder(self.run))
        self.token = lease.run_token(self.run)
        self.began = time.monotonic()
        self.clients: list[tuple[Any, Pipe]] = []
        for number in range(NUM_CLIENTS):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve_clients, args=(options, number, self.token, theirs), daemon=True)
            process.start()
            self.clients.append((process, ours))

    def _start_coordinator(self, number: int) -> Measured:
        process = self._context.Process(target=coordinate, args=(self.options, number), daemon=True)
        process.start()
        return Measured(process)

    def measure(self) -> dict[str, Any]:
        row = self.row
        row["form_seconds"] = self._joined(0) - self.began
        first, _, counts = self._times()
        row["connect_seconds"] = first["start 0"] - self.began
        row["form_cpu_seconds"] = self.leader.cpu_seconds()
        row["requests_of_ranks"] = counts.pop("requests of ranks")
        row["lost_connections"] = counts.pop("lost connections", 0)
        row["form_messages"], row["form_exchanges"] = counts.total(), counts["exchange"]
        for phase in (self._steady, self._loss, self._leader_loss, self._stop) if not self._only_form else ():
            phase()
        row["load"] = os.getloadavg()[0]
        return {key: round(each, 3) if isinstance(each, float) else each for key, each in row.items()}

    def _steady(self) -> None:
        before, cpu, since = self._times()[2], self.leader.cpu_seconds(), time.monotonic()
        time.sleep(STEADY_SECONDS)
        seconds = time.monotonic() - since
        self.row["steady_cores"] = (self.leader.cpu_seconds() - cpu) / seconds
        self.row["steady_messages_per_second"] = (self._times()[2]["exchange"] - before["exchange"]) / seconds
        self.row["mebibytes"] = self.leader.mebibytes()

    def _loss(self) -> None:
        num, cpu = max(1, self.options.nodes // 100), self.leader.cpu_seconds()
        since = time.monotonic()
        share = [num // NUM_CLIENTS + (each < num % NUM_CLIENTS) for each in range(NUM_CLIENTS)]
        for (_, pipe), each in zip(self.clients, share, strict=True):
            pipe.send(("lose", each))
        self.row["loss_reform_seconds"] = self._joined(1) - since
        first, last, _ = self._times()
        self.row["loss_detect_seconds"] = first["kill"] - since
        self.row["loss_kill_seconds"] = last["kill"] - first["kill"]
        self.row["loss_cpu_seconds"] = self.leader.cpu_seconds() - cpu

    def _leader_loss(self) -> None:
        standby = self._start_coordinator(1)
        time.sleep(3.0)  # it must have seen the coordinator's counter change
        since = time.monotonic()
        self.leader.process.kill()
        self.leader.process.join()
        self.leader = standby
        attempts = len(read_attempts(self.run).attempts)
        self.row["leader_reform_seconds"] = self._joined(attempts) - since
        first, _, _ = self._times()
        self.row["leader_detect_seconds"] = first["coordinator lost"] - since
        self.row["leader_take_over_seconds"] = first[f"start {attempts}"] - since
        self.row["leader_cpu_seconds"] = standby.cpu_seconds()

    def _stop(self) -> None:
        since = time.monotonic()
        self.run.stop_request.touch()
        self.leader.process.join(LIMIT_SECONDS)
        _, last, _ = self._times()
        self.row["stop_seconds"] = last["stop"] - since
        self.row["end_seconds"] = last["end"] - since
        assert self.leader.process.exitcode == EXIT_AGAIN, self.leader.process.exitcode

    def close(self) -> None:
        for process, pipe in self.clients:
            pipe.send(("end",))
            process.join(5.0)
        if self.leader.process.is_alive():
            self.leader.process.kill()

    def _joined(self, attempt: int) -> float:
        """Return when all ranks have joined an attempt."""

        def all_joined() -> bool:
            for _, pipe in self.clients:
                pipe.send(("joined", attempt))
            assert self.leader.process.is_alive(), "the coordinator ended"
            return sum(pipe.recv() for _, pipe in self.clients) >= self.world_size

        wait_until(all_joined, pause=0.25)
        return max(each[f"ready {attempt}"] for each in self._all_times(1) if f"ready {attempt}" in each)

    def _all_times(self, which: int) -> list[Any]:
        for _, pipe in self.clients:
            pipe.send(("times",))
        return [pipe.recv()[which] for _, pipe in self.clients]

    def _times(self) -> tuple[dict[str, float], dict[str, float], Counter[str]]:
        first, last, counts = dict[str, float](), dict[str, float](), Counter[str]()
        for _, pipe in self.clients:
            pipe.send(("times",))
            mine = pipe.recv()
            first = mine[0] | {key: min(each, mine[0].get(key, each)) for key, each in first.items()}
            last = mine[1] | {key: max(each, mine[1].get(key, each)) for key, each in last.items()}
            counts += Counter(mine[2])
        return first, last, counts


def serve_clients(options: Options, number: int, token: str, pipe: Pipe) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    Fleet(options, number, token).serve(pipe)


def make_run(path: Path, world_size: int, nodes: int) -> RunDirectory:
    overrides = [f"cluster={nodes}x{world_size // nodes}xh100", f"train.global_batch={world_size}"]
    recipe = parse_recipe("", name="simulated", overrides=overrides)
    return create_run(path, recipe, Plan(mesh=Mesh(dp_shard=world_size), micro_batch=1))


def wait_until(condition: Callable[[], Any], *, pause: float = 0.01) -> None:
    until = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(pause)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--nodes", default="8,32,128,512,1024")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--direct", action="store_true", help="every rank has a connection to the coordinator")
    parser.add_argument("--only-form", action="store_true", help="end each run when its ranks have joined")
    given = parser.parse_args(arguments)
    for nodes in map(int, given.nodes.split(",")):
        folder = tempfile.mkdtemp(prefix="trimaran-control-plane-")
        options = Options(run=f"{folder}/run", nodes=nodes, ranks_per_node=given.ranks_per_node,
                          direct=given.direct)  # fmt: skip
        os.environ["TRIMARAN_BAD_NODES"] = f"{folder}/bad-nodes.jsonl"
        driver = Driver(options, only_form=given.only_form)
        try:
            print(json.dumps(driver.measure()), flush=True)
        finally:
            driver.close()
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    threading.stack_size(1 << 20)
    main()
