"""Time from `trimaran launch` to the first step on each target, beside `trimaran train` on this machine.

usage: python -m benchmarks.start_targets [--rounds 3] [--targets local,ssh,slurm,ray,k8s] [--json]

A tiny model on two nodes with one CPU rank each, with all checks. The targets are those of the tests, on this machine:
sshd in two network namespaces, a Slurm cluster of virtual nodes, a Ray cluster of two nodes, pods in namespaces behind
a mock API server; they need root, and are left out if something is missing. They are started before, which is not
counted. `train` is `trimaran train` with two ranks on one node. Targets alternate for `--rounds`; medians are printed.

The phases: `command`: until the command has returned, the job is submitted; `nodes`: until the supervisors have formed
and start ranks (for a target that is faster than its command, counted from the command's end, it may be negative);
`ranks`: until they are ready to train; `first step`. `all` is their sum.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.start import events_of
from tests.fault.harness import ROOT, TINY, wait_for
from tests.launched import Call, CommandLine
from tests.pod_runner import can_run_pods
from tests.ray_cluster import RayCluster
from tests.slurm.cluster import TOOLS, SlurmCluster
from tests.ssh_machines import MISSING, SshMachines

from trimaran.runs import RunDirectory
from trimaran.runs.run_records import read_attempts

MAX_START_SECONDS = 300.0
SETTINGS = [f"--set={each}" for each in (*TINY, "train.steps=2", "checkpoint.every=100")]
VARIABLES = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
PHASES = ("command", "nodes", "ranks", "first step", "all")


@dataclass(frozen=True, kw_only=True)
class Place:
    """A target that is ready: the user's command line, options of `trimaran launch`, and where runs are.

    `runs` is the folder of the runs as this machine sees it, `named` as the nodes do.
    """

    line: CommandLine
    words: Sequence[str]
    runs: Path
    named: str = ""


def site(**fields: object) -> list[str]:
    return [f"--site={name}={json.dumps(value)}" for name, value in fields.items()]


@contextmanager
def local(folder: Path) -> Iterator[Place]:
    yield Place(line=CommandLine(folder / "user"), words=["--on=local"], runs=folder)


@contextmanager
def ssh(folder: Path) -> Iterator[Place]:
    with SshMachines(folder / "machines") as machines:
        words = ["--on=ssh", f"--hosts={','.join(machines.hosts)}"]
        words += site(config_file=str(machines.config), environment=VARIABLES)
        call: Call = machines.run
        yield Place(line=CommandLine(folder / "user", call=call), words=words, runs=folder)


@contextmanager
def slurm(folder: Path) -> Iterator[Place]:
    with SlurmCluster() as cluster:
        line = CommandLine(folder / "user", cluster.environment)
        yield Place(line=line, words=["--on=slurm", "--site=time=10"], runs=folder)


@contextmanager
def ray(folder: Path) -> Iterator[Place]:
    with RayCluster(folder, nodes=2) as cluster:
        token = {name: each for name, each in cluster.environment.items() if name.startswith("RAY_")}
        words = ["--on=ray", *site(address=cluster.address, node_addresses=["127.0.1.1", "127.0.1.2"])]
        words += site(environment=VARIABLES, python=sys.executable)
        yield Place(line=CommandLine(folder / "user", token), words=words, runs=folder)


@contextmanager
def k8s(folder: Path) -> Iterator[Place]:
    from tests.kubernetes_cluster import KubernetesCluster  # noqa: PLC0415 - needs packages of the tests

    with KubernetesCluster(folder / "cluster") as cluster:
        words = ["--on=k8s", *site(kind="job", image="registry.example/trimaran:1.0", python=sys.executable)]
        words += site(env=VARIABLES)
        yield Place(
            line=CommandLine(folder / "user", cluster.environment), words=words, runs=cluster.volume, named="/runs"
        )


TARGETS: dict[str, Callable[[Path], object]] = {"local": local, "ssh": ssh, "slurm": slurm, "ray": ray, "k8s": k8s}


def missing(target: str) -> str:
    """Return what a target needs and this machine does not have; empty if it can be measured."""
    match target:
        case "ssh":
            return MISSING
        case "slurm":
            return "" if os.geteuid() == 0 and all(map(shutil.which, TOOLS)) else "needs root and Slurm"
        case "ray":
            return "" if find_spec("ray") else "needs Ray"
        case "k8s":
            known = can_run_pods() and find_spec("kmock") and find_spec("kubernetes")
            return "" if known else "needs root, ip, and the packages kmock and kubernetes"
    return ""


def launched(place: Place, name: str) -> dict[str, float]:
    """Return the seconds of one launch, by phase; the job is followed to its end."""
    began = time.time()
    path = f"{place.named or place.runs}/{name}"
    job = place.line.json("launch", *place.words, *SETTINGS, "--set=cluster=2x1xcpu", f"--run-dir={path}")
    found = phases(RunDirectory(place.runs / name), began, time.time())
    place.line.trimaran("jobs", job["id"], "--wait")
    return found


def trained(folder: Path, name: str) -> dict[str, float]:
    """Return the seconds of `trimaran train` on this machine; its command ends with the run."""
    line, began = CommandLine(folder / "user"), time.time()
    line.trimaran("train", *SETTINGS, "--set=cluster=2xcpu", f"--run-dir={folder / name}", "--quiet")
    run = RunDirectory(folder / name)
    return phases(run, began, read_attempts(run).attempts[0].time)


def phases(run: RunDirectory, began: float, returned: float) -> dict[str, float]:
    wait_for(lambda: events_of(run).keys() >= {"ready", "started"}, MAX_START_SECONDS)
    events, first = events_of(run), read_attempts(run).attempts[0].time
    step = events["started"]["data"]["seconds"]
    ready = events["ready"]["time"]
    seconds = (returned - began, first - returned, ready - first, step, ready + step - began)
    return dict(zip(PHASES, seconds, strict=True))


def measure(targets: Sequence[str], rounds: int) -> dict[str, dict[str, float]]:
    """Return the median seconds of each target by phase."""
    found: dict[str, list[dict[str, float]]] = {}
    os.environ.update(VARIABLES)
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="start-targets-")))
        places = {}
        for name in targets:
            (base / name).mkdir()
            places[name] = stack.enter_context(TARGETS[name](base / name))
        trained(base, "first")  # prepares the data, and reads all files once
        for number in range(rounds):
            found.setdefault("train", []).append(trained(base, f"train-{number}"))
            for name, place in places.items():
                found.setdefault(name, []).append(launched(place, f"run-{number}"))
    return {name: {phase: statistics.median(each[phase] for each in starts) for phase in PHASES}
            for name, starts in found.items()}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    asked = options.targets.split(",")
    left_out = {name: why for name in asked if (why := missing(name))}
    load = os.getloadavg()[0]
    found = measure([name for name in asked if name not in left_out], options.rounds)
    if options.json:
        seconds = {name: {key: round(each, 2) for key, each in phases.items()} for name, phases in found.items()}
        print(json.dumps({"seconds": seconds, "rounds": options.rounds, "load": load, "left out": left_out}))
        return
    print(f"| target | {' | '.join(PHASES)} | over train |\n|---|{'---:|' * (len(PHASES) + 1)}")
    for name, each in found.items():
        cells = " | ".join(f"{each[phase]:.1f}" for phase in PHASES)
        print(f"| `{name}` | {cells} | {each['all'] / found['train']['all']:.2f} |")
    print(f"\nMedians of {options.rounds} starts in seconds; load before: {load:.1f}.")
    for name, why in left_out.items():
        print(f"{name} was left out: {why}.")


if __name__ == "__main__":
    main()
