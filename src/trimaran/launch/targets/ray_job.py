"""The Ray job of a run: one actor on each node runs the node's supervisor as a child process.

Usage: `python ray_job.py job.json`, or the same as the entrypoint of `ray job submit`. It needs Ray on the machine that
runs it, and Trimaran on the nodes; it imports nothing of Trimaran, so that it can be copied and run alone.

The supervisors form the run by themselves, and resize it when one of them is lost or joins. This driver only decides
where they run. It exits with the run's exit code: 0 done; 2 configuration error; 75 stopped with a complete
checkpoint, start it again; 93 no progress, do not start it again; others are faults.
"""

import ctypes
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util import get_node_ip_address
from ray.util.metrics import Gauge
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

log = logging.getLogger("ray_job")

NAMESPACE = "trimaran"
END_CODES = (0, 2, 75, 93)  # of a supervisor: the run is over on all nodes
EXIT_USER, EXIT_FAULT, EXIT_AGAIN = 2, 1, 75
MAX_STARTS = 4  # of a supervisor in one place, after faults of the supervisor itself
POLL_SECONDS = 0.5
LAST_SECONDS = 20.0  # for the other supervisors to end after the first
JOIN_SECONDS = 5.0  # between two looks for nodes that joined the cluster
TAIL_BYTES = 1 << 14  # of the metrics: more than one line
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class SupervisorActor:
    """Runs the supervisor of one node as a child process in its own session, which dies with this actor."""

    def __init__(self, job: Mapping[str, Any], index: int) -> None:
        self._metrics = Path(job["run"]) / "metrics.jsonl"
        command = [job["python"] or sys.executable, *job["arguments"]]
        if job["node_addresses"]:
            command.append(f"--address={job['node_addresses'][index % len(job['node_addresses'])]}")
        environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"}
        libc = ctypes.CDLL(None)

        def prepare() -> None:
            """Die with the actor, and receive signals: Ray's workers block SIGINT."""
            libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
            signal.pthread_sigmask(signal.SIG_SETMASK, [])

        self._process = subprocess.Popen(command, env=environment | job["environment"], start_new_session=True,
                                         stdin=subprocess.DEVNULL, preexec_fn=prepare)  # fmt: skip

    def place(self) -> dict[str, Any]:
        """Return where the supervisor runs."""
        node = ray.get_runtime_context().get_node_id()
        return {"node": node, "ip": get_node_ip_address(), "pid": self._process.pid}

    def poll(self) -> dict[str, Any]:
        """Return the supervisor's exit code, None while it runs, and the newest metrics that this node can read."""
        return {"code": self._process.poll(), "metrics": newest_metrics(self._metrics)}

    def stop(self) -> None:
        """Ask the run to stop with a complete checkpoint."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)


class ReportActor:
    """Holds the state of the run for programs in the cluster, and exports its newest metrics to Ray's dashboard."""

    def __init__(self, name: str) -> None:
        self._state: dict[str, Any] = {}
        self._gauges = {
            "step": Gauge("trimaran_step", "Optimizer steps that the run has finished.", ("run",)),
            "loss": Gauge("trimaran_loss", "Loss of the newest step.", ("run",)),
            "tokens_per_second": Gauge("trimaran_tokens_per_second", "Tokens a second, newest step.", ("run",)),
            "num_nodes": Gauge("trimaran_nodes", "Nodes with a running supervisor.", ("run",)),
        }
        for gauge in self._gauges.values():
            gauge.set_default_tags({"run": name})

    def report(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)
        for name, gauge in self._gauges.items():
            if isinstance(value := state.get(name), int | float):
                gauge.set(value)

    def state(self) -> dict[str, Any]:
        return self._state


def newest_metrics(path: Path) -> dict[str, float] | None:
    """Return step, loss and tokens a second of the newest complete line of a run's metrics; None if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            complete, _, _ = file.read(TAIL_BYTES).rpartition(b"\n")
        line = json.loads(complete.rpartition(b"\n")[2])
        rate = line["tokens"] / line["step_seconds"] if line["step_seconds"] else 0.0
        return {"step": line["step"], "loss": line["loss"], "tokens_per_second": rate}
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass
class SupervisorPlace:
    """A place for a supervisor: a bundle of the placement group, or a node that joined the cluster later."""

    index: int
    strategy: Any
    actor: Any = None
    answer: Any = None  # the pending call
    where: Mapping[str, Any] | None = None  # None until the actor has started
    starts: int = 0
    code: int | None = None


class RayDriver:
    """Starts a supervisor in each place, a new one where a node was lost, and one on each node that joins."""

    def __init__(self, job: Mapping[str, Any], group: PlacementGroup, stop: threading.Event) -> None:
        self._job, self._stop = job, stop
        self._places = [
            SupervisorPlace(index, PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index))
            for index in range(group.bundle_count)
        ]
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        self._reporter = actor_class(ReportActor).options(
            name=job["name"], num_cpus=0, max_restarts=-1, scheduling_strategy=here
        ).remote(job["name"])  # fmt: skip
        self._metrics: dict[str, float] = {}
        self._looked = self._alive = time.monotonic()
        self._stop_sent_at: float | None = None

    def run_to_end(self) -> int:
        """Return the run's exit code once it is over."""
        while (code := self._end_code()) is None:
            if self._stop.is_set() and self._stop_sent_at is None:
                self._stop_sent_at = time.monotonic()
                log.info("stopping the run with a complete checkpoint")
                for place in self._places:
                    if place.actor is not None and place.where:
                        place.actor.stop.remote()
            for place in self._places:
                if place.actor is None and place.code is None and not self._stop.is_set():
                    resources = dict(self._job["resources_per_node"])
                    options = {
                        "num_cpus": resources.pop("CPU", 0),
                        "num_gpus": resources.pop("GPU", 0),
                        "resources": resources,
                    }
                    environment = {"env_vars": {"RAY_worker_niceness": "0"}}  # Ray's own is 15, and children inherit it
                    actor = actor_class(SupervisorActor).options(
                        scheduling_strategy=place.strategy, runtime_env=environment, **options
                    ).remote(self._job, place.index)  # fmt: skip
                    place.actor, place.answer, place.where = actor, actor.place.remote(), None
                    place.starts += 1
            self._add_places()
            self._poll()
            self.report("running")
        until = time.monotonic() + LAST_SECONDS
        while code in END_CODES and time.monotonic() < until and any(place.actor for place in self._places):
            self._poll()
        return code

    def report(self, state: str, code: int | None = None) -> None:
        """Give the state to the report actor."""
        nodes = [place.where for place in self._places if place.actor is not None and place.where]
        now = {"state": state, "exit_code": code, "num_nodes": len(nodes), "nodes": nodes, **self._metrics}
        self._reporter.report.remote(now)

    def _poll(self) -> None:
        asked = {place.answer: place for place in self._places if place.actor is not None}
        began = time.monotonic()
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=POLL_SECONDS) if asked else ([], [])
        for answer in ready:
            try:
                self._read(asked[answer], ray.get(answer))
            except ActorUnavailableError:  # for now: the connection broke
                asked[answer].answer = asked[answer].actor.poll.remote()
            except RayActorError as error:
                # Forget a lost actor. A new one is started in its place, as soon as the cluster has a node for it.
                place = asked[answer]
                log.warning("place %d is lost: %s", place.index, str(error).strip().splitlines()[0])
                place.actor = None
                if place.where is not None:
                    place.starts = 0
                elif place.starts >= MAX_STARTS:
                    place.code = EXIT_FAULT
                if isinstance(place.strategy, NodeAffinitySchedulingStrategy):
                    self._places.remove(place)
        time.sleep(max(0.0, POLL_SECONDS - (time.monotonic() - began)))

    def _read(self, place: SupervisorPlace, answer: Mapping[str, Any]) -> None:
        self._alive = time.monotonic()
        if "pid" in answer:
            place.where = answer
            log.info("place %d: supervisor with pid %d on %s", place.index, answer["pid"], answer["ip"])
        elif answer["code"] is not None:
            log.info("place %d: the supervisor ended with code %d", place.index, answer["code"])
            ray.kill(place.actor)
            place.actor = None
            place.code = answer["code"] if answer["code"] in END_CODES or place.starts >= MAX_STARTS else None
            return
        elif answer["metrics"] and answer["metrics"]["step"] >= self._metrics.get("step", 0):
            self._metrics = answer["metrics"]
        place.answer = place.actor.poll.remote()

    def _add_places(self) -> None:
        """Start a supervisor on a node that joined the cluster, if the run may use more nodes than it has places."""
        full = len(self._places) >= self._job["max_nodes"] or any(place.where is None for place in self._places)
        if full or self._stop.is_set() or time.monotonic() < self._looked + JOIN_SECONDS:
            return
        self._looked = time.monotonic()
        used = {place.where["node"] for place in self._places if place.where}
        for node in ray.nodes():
            fits = all(node["Resources"].get(name, 0) >= need for name, need in self._job["resources_per_node"].items())
            if node["Alive"] and fits and node["NodeID"] not in used and len(self._places) < self._job["max_nodes"]:
                index = max(place.index for place in self._places) + 1
                self._places.append(SupervisorPlace(index, NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)))

    def _end_code(self) -> int | None:
        """Return the run's exit code; None if it is not over."""
        codes = [place.code for place in self._places if place.code is not None]
        for code in END_CODES:
            if code in codes:
                return code
        if codes and len(codes) == len(self._places):
            return codes[0]
        if self._stop_sent_at is not None:
            if not any(place.actor is not None and place.where for place in self._places):
                return EXIT_AGAIN
            return EXIT_FAULT if time.monotonic() > self._stop_sent_at + self._job["stop_seconds"] else None
        if time.monotonic() > self._alive + self._job["wait_seconds"]:
            log.error("no node answered for %.0f s", self._job["wait_seconds"])
            return EXIT_AGAIN
        return None


def actor_class(kind: type) -> Any:
    return ray.remote(kind)


def reserve_nodes(job: Mapping[str, Any], stop: threading.Event) -> PlacementGroup | None:
    """Return a placement group with one bundle on each node: as many nodes as asked for, or at least the minimum.

    None if the cluster has too few in time, or the job is to stop. An autoscaler starts nodes while this waits.
    """
    for num_nodes in range(job["nodes"], job["min_nodes"] - 1, -1):
        group = placement_group([dict(job["resources_per_node"])] * num_nodes, strategy="STRICT_SPREAD")
        until = time.monotonic() + (job["wait_seconds"] if num_nodes == job["nodes"] else JOIN_SECONDS)
        while not stop.is_set() and time.monotonic() < until:
            if group.wait(1):
                return group
        remove_placement_group(group)
        if stop.is_set():
            return None
        log.warning("the cluster has no %d nodes with %s", num_nodes, job["resources_per_node"])
    return None


def connect(job: Mapping[str, Any], folder: Path) -> Cluster | None:
    """Connect to the cluster of this job; or start a local one with as many nodes as asked for, and return it."""
    if job["address"] != "local":
        submitted = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ  # then Ray has uploaded the folder already
        ray.init(address="auto", namespace=NAMESPACE, runtime_env=None if submitted else {"working_dir": str(folder)})
        return None
    known = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if not any(name in os.environ for name in known) and not (Path.home() / ".ray" / "auth_token").exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # of this cluster only
    resources = dict(job["resources_per_node"])
    node: dict[str, Any] = {"num_cpus": resources.pop("CPU", 1), "num_gpus": resources.pop("GPU", 0)}
    node |= {"resources": resources, "include_dashboard": False}
    addresses = [f"127.0.0.{index + 2}" for index in range(job["nodes"])]  # Ray replaces 127.0.0.1 by a public one
    cluster = Cluster(initialize_head=True, head_node_args=node | {"node_ip_address": addresses[0]})
    for address in addresses[1:]:
        cluster.add_node(node_ip_address=address, **node)
    ray.init(address=cluster.address, namespace=NAMESPACE, runtime_env={"working_dir": str(folder)})
    return cluster


def main(arguments: Sequence[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    path = Path(arguments[0] if arguments else "job.json").resolve()
    job = json.loads(path.read_text(encoding="utf-8"))
    code, cluster, stop = EXIT_FAULT, None, threading.Event()
    try:
        cluster = connect(job, path.parent)
        for number in (signal.SIGTERM, signal.SIGINT):  # after `ray.init`, which sets its own
            signal.signal(number, lambda *_: stop.set())
        if group := reserve_nodes(job, stop):
            driver = RayDriver(job, group, stop)
            code = driver.run_to_end()
            driver.report("ended", code)
        else:
            code = EXIT_AGAIN if stop.is_set() else EXIT_USER
    except RayError as error:
        log.error("%s", error)
    finally:
        ray.shutdown()
        if cluster is not None:
            cluster.shutdown()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
