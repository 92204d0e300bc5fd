"""The interface of a launch target: it writes files that a person can read and run, submits them, and follows the job.

A target never starts anything while it writes files, and the files never contain the value of a secret. Launched jobs
are recorded, one JSON file for each, in the user's state folder. Also what the scripts of targets share.
"""

import contextlib
import json
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel

from trimaran.core import EXIT_AGAIN, EXIT_DONE, Plan, Recipe, Seconds, UserError, did_you_mean, templated
from trimaran.core.plugins import installed_plugins, load_plugin, plugin_names
from trimaran.core.regular_files import read_regular_bytes, write_atomically
from trimaran.launch.supervise.detached import DetachedProcess
from trimaran.machine import Cluster

# By name, in the order in which help and completion list them. Only the requested one is imported.
TARGET_CLASSES = {
    "local": "trimaran.launch.targets.local_target:LocalTarget",
    "ssh": "trimaran.launch.targets.ssh_target:SshTarget",
    "slurm": "trimaran.launch.targets.slurm_target:SlurmTarget",
    "k8s": "trimaran.launch.targets.k8s_target:KubernetesTarget",
    "ray": "trimaran.launch.targets.ray_target:RayTarget",
    "sky": "trimaran.launch.targets.sky_target:SkyTarget",
}
OTHER_NAMES = {"kubernetes": "k8s", "skypilot": "sky"}
ALIASES = {"k8s": "kube kubectl docker container gke eks aks openshift", "slurm": "sbatch srun pbs", "ray": "kuberay "
           "anyscale", "ssh": "hosts remote mpi", "sky": "cloud aws gcp azure", "local": "localhost here"}  # fmt: skip
SAVE_SECONDS = Seconds(60.0)  # of a checkpoint that nothing is known about
MAX_NAME = 40  # characters of a job's name: targets add to it, and Kubernetes allows 63
State = Literal["queued", "running", "done", "stopped", "failed", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """What to launch."""

    name: str
    run_dir: Path  # as the nodes see it, an absolute path
    recipe: Recipe
    plan: Plan
    cluster: Cluster
    site: Any  # the target's defaults of this site, with those of the command line on top
    hosts: tuple[str, ...] = ()
    # created here, on a disk that the nodes share; else the first node creates it from the launch files
    run_exists: bool = True
    check: bool = True
    save_seconds: Seconds = SAVE_SECONDS  # how long a checkpoint is predicted to take
    # names of environment variables that the ranks may need; values are passed by reference only
    secrets: tuple[str, ...] = ()

    @property
    def num_nodes(self) -> int:
        return self.cluster.num_nodes

    @property
    def ranks_per_node(self) -> int:
        return self.cluster.devices_per_node

    @property
    def min_nodes(self) -> int:
        """The fewest nodes to continue with: those that hold the fewest ranks of `faults.ranks`, else all."""
        ranks = self.recipe.faults.ranks
        return min(self.num_nodes, -(-ranks[0] // self.ranks_per_node)) if ranks else self.num_nodes

    @property
    def max_nodes(self) -> int:
        """The most nodes that may take part: those that hold the most ranks of `faults.ranks`, else those asked for."""
        ranks = self.recipe.faults.ranks
        return max(self.num_nodes, ranks[1] // self.ranks_per_node) if ranks else self.num_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFiles:
    """The files of a launch by name, and the commands that submit them from their folder, without Trimaran."""

    files: Mapping[str, str]
    main: str  # the name of the file to read first
    submit: Sequence[Sequence[str]]
    executable: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A launched job. `native_id` is the target's own name for it; `details` are what the target needs to find it."""

    id: str
    target: str
    name: str
    native_id: str
    run_dir: str
    folder: str  # of the launch files
    submitted: float  # wall clock
    host: str  # from which it was submitted
    num_nodes: int
    ranks_per_node: int
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What a target says about a job. `native` is its own word for the state, `reason` why, if it says so."""

    state: State
    native: str = ""
    reason: str = ""
    exit_code: int | None = None
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCommands:
    """The commands behind a job: follow its output, stop it with a checkpoint, start it again."""

    follow: Sequence[str]
    stop: Sequence[str]
    resume: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCheck:
    """One line of `trimaran launch --check`. `error` is None if it passed."""

    name: str
    found: str
    error: UserError | None = None


def ask_check(name: str, question: Callable[[], str]) -> SiteCheck:
    """Return the check whose `question` says what was found, or raises an error."""
    try:
        return SiteCheck(name=name, found=question())
    except UserError as error:
        return SiteCheck(name=name, found=error.what, error=error)


class Target(Protocol):
    """One place to launch runs. Methods raise UserError for a person's mistake, also when the target's tool fails.

    That of a plug-in also has `contract`, version 1, and the name of its entry point.
    """

    name: str
    site_model: type[BaseModel]  # of the target's section in the site file
    # The run directory is created by `trimaran launch`, on a disk that the nodes share. Otherwise it is a path on the
    # nodes, below the field `runs` of the site's section, and the first node creates it from the launch files.
    shares_disk: bool

    def check(self, request: LaunchRequest | None, site: Any) -> list[SiteCheck]:
        """Return what was checked before anything is submitted: tools, limits, partitions, nodes.

        Without a request only the site's section is checked.
        """

    def render(self, request: LaunchRequest) -> LaunchFiles:
        """Return the launch files. Starts nothing, reads no network, and gives the same files for the same request."""

    def submit(self, request: LaunchRequest, folder: Path) -> tuple[str, dict[str, Any]]:
        """Submit the files in `folder`; return the job's native id and the details of its record."""

    def submit_again(self, job: JobRecord) -> tuple[str, dict[str, Any]]:
        """Submit the files of a job again: the run continues from its newest state."""

    def state(self, job: JobRecord) -> JobState:
        """Return the job's state, by asking the target."""

    def stop(self, job: JobRecord) -> None:
        """Ask the job to stop with a complete checkpoint."""

    def commands(self, job: JobRecord) -> JobCommands:
        """Return the commands that a person would use, without Trimaran where the target has its own."""


def open_target(name: str) -> Target:
    """Return the target with this name, built in or a plug-in's; raise UserError if there is none."""
    folded = name.casefold()
    name = OTHER_NAMES.get(folded, folded if folded in TARGET_CLASSES else name)
    if name not in TARGET_CLASSES:
        if any(each.name == name for each in installed_plugins("launch target")):
            return load_plugin("launch target", name)
        known = target_names()
        meant = next((each for each, aliases in ALIASES.items() if name.casefold() in aliases.split()), "")
        near = templated(" (did you mean '{meant}'?)", meant=meant) if meant else did_you_mean(name, known)
        raise UserError("L001.no-target", where="--on", name=name, near=near, known=", ".join(known))
    module, _, kind = TARGET_CLASSES[name].partition(":")
    return getattr(import_module(module), kind)()


def target_names() -> tuple[str, ...]:
    """Return the names of all targets: those built in first, then those of plug-ins."""
    return (*TARGET_CLASSES, *plugin_names("launch target"))


def job_name(name: str) -> str:
    """Return a run's name as a DNS label, which every target accepts: lower case letters, digits and hyphens."""
    label = re.sub(r"[^a-z0-9]+", "-", name.casefold()).strip("-")[:MAX_NAME].rstrip("-")
    return label if label[:1].isalpha() else f"run-{label}".rstrip("-")


def node_command(
    request: LaunchRequest, *, python: str, launch_folder: str = "", address: str = "", nodes: int = 0
) -> list[str]:
    """Return the command of a node's supervisor, the same on every node.

    The supervisor finds its own address unless `address` is given. If the run directory does not exist yet, the first
    node creates it from the recipe and plan in `launch_folder`, a path on the node. `nodes` is how many can take part
    on a target that gets no more of them; by default those that hold the most ranks of `faults.ranks`. The run starts
    with those of the cluster, and grows when more join.
    """
    nodes = nodes or request.max_nodes
    command = [python, "-m", "trimaran.launch", str(request.run_dir)]
    if launch_folder:
        command.append(f"--create-from={launch_folder}")
    if nodes > 1:
        command += [f"--nodes={nodes}", f"--ranks-per-node={request.ranks_per_node}"]
        command += [f"--address={address or 'auto'}"]
    if request.min_nodes < nodes:
        command.append(f"--min-nodes={request.min_nodes}")
    if request.num_nodes < nodes:
        command.append(f"--start-nodes={request.num_nodes}")
    if not request.check:
        command.append("--no-check")
    return command


EXIT_UNREACHABLE = 69  # of a script that could reach no node; EX_UNAVAILABLE of sysexits.h
NO_CONNECTION = 255  # what ssh returns then
EXIT_CODES = """\
# Exit codes: 0 done; 2 a configuration error; 75 stopped with a checkpoint, start it again; 93 no progress, do not
# start it again; others are faults."""

# Shell functions. Nodes of a run normally end with the same code; one that was lost or refused may end with another.
SHARED_FUNCTIONS = r"""
# choose_code CODE...: the code of the run. 0 says that it is done. Codes that say not to start it again (93, 2) count
# more than 75, which says to do so, and that counts more than a fault. 255 says only that there was no connection.
choose_code() {
  local wanted code
  for wanted in 0 93 2 75; do
    for code in "$@"; do
      if [ "$code" -eq "$wanted" ]; then echo "$code"; return; fi
    done
  done
  for code in "$@"; do
    if [ "$code" -ne 255 ]; then echo "$code"; return; fi
  done
  echo 69
}

# with_prefix NAME: copies stdin to stdout, each line after [NAME] and at once; some versions of awk and sed wait.
with_prefix() {
  local line
  while IFS= read -r line || [ -n "$line" ]; do printf '[%s] %s\n' "$1" "$line"; done
}

# wait_for PID...: returns when all have ended; a signal that is trapped does not end it.
wait_for() {
  local pid
  for pid in "$@"; do
    while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done
  done
}
"""


def commented(text: str) -> str:
    """Return a user's text for a comment of a script: in one line and in ASCII."""
    return json.dumps(text)


def state_of_code(code: int, *, reason: str = "", nodes: tuple[str, ...] = ()) -> JobState:
    """Return the state of a job whose script or supervisors have ended with `code`."""
    state = "done" if code == EXIT_DONE else "stopped" if code == EXIT_AGAIN else "failed"
    return JobState(state=state, native=f"exit {code}", exit_code=code, reason=reason, nodes=nodes)


def state_of_process(process: DetachedProcess) -> JobState:
    """Return the state of a job whose script or driver is a process of this machine."""
    found = process.state()
    match found["state"]:
        case "running":
            return JobState(state="running", native=f"process {found['pid']}", nodes=(found["host"],))
        case "ended":
            return state_of_code(found["code"], reason=found.get("error", ""))
        case "lost":
            return JobState(state="failed", reason=f"process {found['pid']} is gone; the machine may have rebooted")
    return JobState(state="unknown", reason="it was not started here")


JOB_ID = re.compile(r"[a-z0-9]+-[A-Za-z0-9._-]{1,80}")
MAX_RECORD_BYTES = 1 << 20


def state_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of the records: `$XDG_STATE_HOME/trimaran/jobs`, by default below `~/.local/state`."""
    return Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "trimaran" / "jobs"


def job_id(target: str, native_id: str) -> str:
    """Return the id of a job: the target's name and its own id."""
    return f"{target}-{re.sub(r'[^A-Za-z0-9._-]+', '-', native_id)}"


def new_record(
    request: LaunchRequest, target: str, folder: Path, native_id: str, details: Mapping[str, Any]
) -> JobRecord:
    return JobRecord(
        id=job_id(target, native_id),
        target=target,
        name=request.name,
        native_id=native_id,
        run_dir=str(request.run_dir),
        folder=str(folder),
        submitted=time.time(),
        host=platform.node(),
        num_nodes=request.num_nodes,
        ranks_per_node=request.ranks_per_node,
        details=dict(details),
    )


def write_record(job: JobRecord, folder: Path) -> None:
    """Write a record; an older one of the same job is replaced."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(folder / f"{job.id}.json", json.dumps(asdict(job), indent=1))


def read_records(folder: Path) -> list[JobRecord]:
    """Return all jobs, the newest first. Files that are not records are left out."""
    found = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(read_regular_bytes(path, limit_bytes=MAX_RECORD_BYTES))
            job = JobRecord(**{each.name: record[each.name] for each in fields(JobRecord)})
            if JOB_ID.fullmatch(job.id):
                found.append(job)
    return sorted(found, key=lambda job: -job.submitted)


def find_record(folder: Path, wanted: str) -> JobRecord:
    """Return the job with this id, native id or name, the newest if several have it; raise UserError if none has."""
    jobs = read_records(folder)
    for job in jobs:
        if wanted in (job.id, job.native_id, job.name, job.run_dir):
            return job
    known = [job.id for job in jobs]
    raise UserError("L002.no-job", where="trimaran jobs", wanted=wanted, guess=did_you_mean(wanted, known))
