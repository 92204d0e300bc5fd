"""The batch script of a run under Slurm: options, one supervisor a node, and what happens when the job ends.

Also the section `slurm` of the site file, and how long a stop takes: the last checkpoint and the last step, as a run
has measured them or as they are predicted.
"""

import contextlib
import hashlib
import json
import math
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from trimaran.core import EXIT_AGAIN, Seconds, UserError
from trimaran.launch.targets.target import LaunchRequest, job_name, node_command
from trimaran.runs import RunDirectory, last_lines, lines_from_end

TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


def _matching(pattern: str, otherwise: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(otherwise)
        return text

    return AfterValidator(check)


# Slurm's own lists of names: `n[1-4,7]`, `a100&ib`, `user@host`. No blanks and nothing that a shell or sbatch expands.
Word = Annotated[str, _matching(r"[A-Za-z0-9_.,:;@+=()&|*%/\[\]!^-]*",
                                "only letters, digits and _.,:;@+=()&|*%/[]!^- are allowed here")]  # fmt: skip
Option = Annotated[str, _matching(r"--[^\x00-\x1f]*", "write an option of sbatch as it is written there, on one line: "
                                  "--licenses=matlab:1")]  # fmt: skip
Line = Annotated[str, _matching(r"[^\0\n\r]*", "write one line of shell for each entry")]
Time = Annotated[str, _matching(f"(?:{TIME.pattern})?", "write a time limit as Slurm does: MINUTES, "
                                "HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS")]  # fmt: skip


class SlurmSite(BaseModel):
    """The section `slurm`: where a job waits, what it gets of each node, and how a run starts and continues."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    partition: Annotated[Word, Field(description="partition; empty: the default one")] = ""
    account: Annotated[Word, Field(description="account to charge")] = ""
    qos: Annotated[Word, Field(description="quality of service")] = ""
    constraint: Annotated[Word, Field(description="features that the nodes must have, such as `h100&ib`")] = ""
    reservation: Annotated[Word, Field(description="reservation to run in")] = ""
    exclude: Annotated[Word, Field(description="nodes to avoid, besides those known to be bad: `n[3,7]`")] = ""
    time: Annotated[Time, Field(description="time limit; empty: the partition's")] = ""
    mail: Annotated[Word, Field(description="address that Slurm writes to when the job ends or fails")] = ""
    options: Annotated[tuple[Option, ...], Field(description="other options of sbatch, such as `--licenses=x:1`")] = ()

    gres: Annotated[
        Word, Field(description="devices by their name in Slurm, such as `gpu:h100`; empty: `--gpus-per-node`")
    ] = ""
    cpus_per_node: Annotated[int, Field(ge=0, description="cores of a node; 0: those that Slurm gives")] = 0
    memory: Annotated[Word, Field(description="memory of a node; `0`: all of it; empty: as `exclusive` says")] = ""
    exclusive: Annotated[bool, Field(description="whole nodes")] = True
    container_image: Annotated[str, Field(description="image that pyxis runs the supervisors in")] = ""
    container_mounts: Annotated[str, Field(description="mounts of that image, `HOST:CONTAINER,...`")] = ""
    setup: Annotated[
        tuple[Line, ...], Field(description="lines of shell before the start, such as `module load cuda`")
    ] = ()
    python: Annotated[str, Field(description="Python with Trimaran on the nodes; empty: the one that launches")] = ""
    runs: Annotated[str, Field(description="folder of new run directories; empty: `runs` in the current folder")] = ""
    shared_disk: Annotated[bool, Field(description="this machine sees the disk that the nodes share")] = True

    runner: Annotated[Literal["supervisor", "torchrun"], Field(description="what `srun` starts on each node")] = (
        "supervisor"
    )
    chain: Annotated[
        Literal["requeue", "array", "singleton"], Field(description="how a run continues after its time limit")
    ] = "requeue"
    chain_jobs: Annotated[int, Field(ge=2, le=1000, description="jobs of a chain that is not `requeue`")] = 10
    rendezvous_port: Annotated[int, Field(ge=1024, le=65535, description="port of torchrun's rendezvous")] = 29400


def time_seconds(text: str) -> float | None:
    """Return the seconds of a time in Slurm's notation; None if it has no limit or is not given."""
    found = TIME.fullmatch(text)
    if found is None:  # UNLIMITED, INFINITE, NONE, empty
        return None
    days, *rest = (int(each) if each is not None else None for each in found.group("days", "first", "second", "third"))
    first, second, third = rest
    if days is not None:  # DAYS-HOURS[:MINUTES[:SECONDS]]
        return 86400.0 * days + 3600.0 * (first or 0) + 60.0 * (second or 0) + (third or 0)
    if third is not None:  # HOURS:MINUTES:SECONDS
        return 3600.0 * (first or 0) + 60.0 * (second or 0) + third
    return 60.0 * (first or 0) + (second or 0)  # MINUTES[:SECONDS]


SLACK_SECONDS = 60
NUM_SAVES = 5  # the longest of the last ones counts
NUM_STEPS = 20
MAX_EVENTS = 2000  # lines to look at, from the end


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTime:
    """The seconds that a run needs to stop with a complete checkpoint, and whether they were measured."""

    save_seconds: Seconds
    step_seconds: Seconds
    measured: bool

    @property
    def lead_seconds(self) -> int:
        """How long before the end of its time a run must be asked to stop."""
        return math.ceil(self.save_seconds) + math.ceil(self.step_seconds) + SLACK_SECONDS

    def __str__(self) -> str:
        how = "the longest of the last saves" if self.measured else "predicted"
        save, step = math.ceil(self.save_seconds), math.ceil(self.step_seconds)
        return f"{save} s for a save ({how}) + {step} s for a step + {SLACK_SECONDS} s = {self.lead_seconds} s"


def stop_time(request: LaunchRequest) -> StopTime:
    """Return how long a stop takes: as measured by the run if it has saved before, else as predicted."""
    predicted = request.plan.prediction.step_seconds if request.plan.prediction else Seconds(0.0)
    known = measured_stop_time(request.run_dir)
    if known is None:
        return StopTime(save_seconds=request.save_seconds, step_seconds=predicted, measured=False)
    return known


def measured_stop_time(run_dir: Path) -> StopTime | None:
    """Return what the run in `run_dir` has measured; None if it has not saved yet."""
    run, saves, uploads = RunDirectory(run_dir), [], [0.0]
    steps = [0.0]
    with contextlib.suppress(OSError):
        for number, (_, line) in enumerate(lines_from_end(run.events(0))):
            event = _parse(line)
            if event.get("kind") == "checkpoint":
                saves.append(float(event.get("data", {}).get("seconds", 0.0)))
            elif event.get("kind") == "upload":  # a run that stops waits until its store has the last checkpoint
                uploads.append(float(event.get("data", {}).get("seconds", 0.0)))
            if len(saves) == NUM_SAVES or number == MAX_EVENTS:
                break
    if not saves:
        return None
    with contextlib.suppress(OSError):
        steps += [float(_parse(line).get("step_seconds", 0.0)) for line in last_lines(run.metrics, NUM_STEPS)]
    save_seconds = Seconds(max(saves) + max(uploads))
    return StopTime(save_seconds=save_seconds, step_seconds=Seconds(max(steps)), measured=True)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


SCRIPT = "job.sbatch"
MAX_LINE = 118
REPEAT_SECONDS = 20  # between signals to a step that has not ended
MAX_LEAD_SECONDS = 65535  # of --signal
STOP_SIGNAL = "USR2"  # saves and ends; USR1 saves and goes on in the next job


def script_lines(request: LaunchRequest, *, excluded: str = "") -> str:
    """Return the batch script. `excluded` are the nodes to avoid, as Slurm lists them."""
    site: SlurmSite = request.site
    if any(ord(character) < 32 for character in str(request.run_dir)):
        raise UserError("L038.path-run-line", where=f"--run-dir {str(request.run_dir)!r}")
    needed = stop_time(request)
    nodes = "1 node" if request.num_nodes == 1 else f"{request.num_nodes} nodes"
    if request.min_nodes < request.max_nodes:
        nodes = f"{request.min_nodes} to {request.max_nodes} nodes"
    ranks = "1 rank" if request.ranks_per_node == 1 else f"{request.ranks_per_node} ranks each"
    # Slurm signals only the batch shell, and the step only if the whole job must end.
    if site.runner == "torchrun":  # which would kill its ranks; rank 0 reads the stop file
        stop = 'touch "$RUN/stop"'
    else:
        stop = 'scancel --quiet --signal=TERM "$SLURM_JOB_ID" || touch "$RUN/stop"'
    # The Python of a container is run inside of it.
    inside = ["srun", "--nodes=1", "--ntasks=1", *_container(site), ""] if site.container_image else []
    parts = [
        "#!/bin/bash",
        *textwrap.wrap(
            f"Run {job_name(request.name)}: {nodes} with {ranks}, plan {request.plan}",
            MAX_LINE,
            initial_indent="# ",
            subsequent_indent="#   ",
        ),
        "# Submit it with `sbatch job.sbatch`, from the folder that it is in.",
        *(f"#SBATCH {quote_option(option)}" for option in batch_options(request, excluded=excluded)),
        f"# Before the time limit the job needs time to save: {needed}.",
        "# Slurm looks at time limits about once a minute; the last term is for that.",
        f"#SBATCH --signal=B:USR1@{min(needed.lead_seconds, MAX_LEAD_SECONDS)}",
        "",
        f"RUN={shlex.quote(str(request.run_dir))}",
        *([] if request.run_exists else ["FOLDER=$PWD  # with recipe.yaml and plan.json"]),
        f"PYTHON={shlex.quote(site.python or sys.executable)}",
        "",
        "# USR1: the time limit is near, or the job is preempted. USR2: stop, and do not go on. Both save first.",
        "# A step that is being created misses a signal, so it is repeated; the run takes several as one.",
        "# TERM: Slurm ends the job (scancel, scontrol requeue) and has told all its processes.",
        'asked="" step="" reason=""',
        "forward() {",
        "  asked=$1",
        f'  while kill -0 "$step" 2>/dev/null; do {stop}; sleep {REPEAT_SECONDS}; done &',
        "}",
        "trap 'forward again' USR1",
        "trap 'forward stop' USR2",
        "trap 'asked=${asked:-again}' TERM",
        'say() { scontrol update JobId="$SLURM_JOB_ID" Comment="$1"; }',
        "",
        *site.setup,
        "# Names of nodes may not resolve on the nodes: use the address that Slurm itself uses.",
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "head=$(scontrol show node --oneliner \"$head\" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')",
        "",
        *_step_lines(request),
        "trap '' USR1 USR2 TERM",
        "# What the coordinator wrote has the last word: srun returns the largest exit code of its tasks.",
        "if { read -r found && read -r reason; } < <( \\",
        f'  {" ".join(inside)}"$PYTHON" -m trimaran.launch.targets.slurm_end "$RUN" \\',
        '  --code="$code" --since="$began" --asked="$asked"); then',
        "  code=$found",
        '  say "$reason"',
        "fi",
        *_chain_lines(request),
        'exit "$code"',
    ]
    return "\n".join(parts) + "\n"


def batch_options(request: LaunchRequest, *, excluded: str = "") -> list[str]:
    site: SlurmSite = request.site
    elastic = request.min_nodes < request.max_nodes
    nodes = f"{request.min_nodes}-{request.max_nodes}" if elastic else str(request.num_nodes)
    given = {
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "constraint": site.constraint,
        "reservation": site.reservation,
        "exclude": excluded,
        "nodelist": ",".join(request.hosts),
        "time": site.time,
        "mail-user": site.mail,
        "mail-type": "END,FAIL,REQUEUE,TIME_LIMIT_90" if site.mail else "",
        "mem": site.memory or ("0" if site.exclusive else ""),
        "cpus-per-task": str(_cpus(request) or ""),
        "array": f"1-{site.chain_jobs}%1" if site.chain == "array" else "",
        "dependency": "singleton" if site.chain == "singleton" else "",
    }
    return [
        f"--job-name={slurm_name(request)}",
        f"--nodes={nodes}",
        *([] if elastic else ["--ntasks-per-node=1"]),  # with it, Slurm gives the fewest nodes of a range
        *([f"--gres={site.gres}:{request.ranks_per_node}"] if site.gres and _on_gpu(request) else []),
        *([f"--gpus-per-node={request.ranks_per_node}"] if not site.gres and _on_gpu(request) else []),
        *(f"--{name}={value}" for name, value in given.items() if value),
        *(["--exclusive"] if site.exclusive else []),
        *(["--no-kill"] if elastic else []),
        "--requeue",
        "--open-mode=append",
        f"--output={_output(request)}",
        *site.options,
    ]


def slurm_name(request: LaunchRequest) -> str:
    """Return the job's name. Jobs of a singleton chain wait for each other by name, so it has the run in it."""
    name = job_name(request.name)
    if request.site.chain != "singleton":
        return name
    return f"{name}-{hashlib.sha256(str(request.run_dir).encode()).hexdigest()[:8]}"


def quote_option(option: str) -> str:
    """Return an option as a line `#SBATCH` needs it: sbatch knows quotes and backslashes, and expands nothing."""
    if not set(option) & set(" \t\"'\\#"):
        return option
    escaped = option.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _step_lines(request: LaunchRequest) -> list[str]:
    """Return the step: one process a node. It is waited for again after each signal."""
    site: SlurmSite = request.site
    elastic = request.min_nodes < request.max_nodes
    srun = ["srun", "--kill-on-bad-exit=0", "--wait=0", "--label", "--cpu-bind=none"]
    srun += [f"--cpus-per-task={cpus}"] if (cpus := _cpus(request)) else []
    srun += ["--ntasks-per-node=1", "--no-kill"] if elastic else []
    srun += _container(site)
    torchrun = site.runner == "torchrun"
    return [
        *(['rm -f "$RUN/stop"'] if torchrun else []),
        "began=$(date +%s)",
        f"{' '.join(srun)} \\",
        *(f"  {line}" for line in (_torchrun(request) if torchrun else _supervisor(request))),
        "step=$!",
        '[ -z "$asked" ] || forward "$asked"  # it came before the step began',
        'while wait "$step"; kill -0 "$step" 2>/dev/null; do :; done',
        'wait "$step"; code=$?',
        "",
    ]


def _supervisor(request: LaunchRequest) -> Iterator[str]:
    """Yield the command of the supervisors; the name of its node is known only in the step."""
    launch_folder = "" if request.run_exists else "FOLDER"
    command = node_command(request, python="PYTHON", launch_folder=launch_folder)
    # Slurm decides how many nodes an elastic job has. The run starts with these, and grows when another job joins.
    is_elastic = request.min_nodes < request.max_nodes
    nodes = f'--nodes={request.max_nodes} --start-nodes="$SLURM_NNODES"' if is_elastic else '--nodes="$SLURM_NNODES"'
    replaced = {
        "PYTHON": '"$PYTHON"',
        str(request.run_dir): '"$RUN"',
        f"--create-from={launch_folder}": '--create-from="$FOLDER"',
        f"--nodes={request.max_nodes}": nodes,
    }
    words = [replaced.get(word) or shlex.quote(word) for word in command if not word.startswith("--start-nodes")]
    if request.max_nodes == 1:
        yield f"{' '.join(words)} &"
        return
    yield 'bash -c \'exec "$@" --node-name="$SLURMD_NODENAME"\' _ \\'
    yield f'{" ".join(words)} --head="$head" &'


def _torchrun(request: LaunchRequest) -> Iterator[str]:
    """Yield the command of torchrun; an id of the job's own keeps two jobs on one node apart."""
    lead = stop_time(request).lead_seconds
    yield f'env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT={lead} "$PYTHON" \\'
    yield f'-m torch.distributed.run --nnodes="$SLURM_NNODES" --nproc-per-node={request.ranks_per_node} \\'
    yield '--rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \\'
    yield f'--rdzv-endpoint="$head:{request.site.rendezvous_port}" \\'
    start = 'resume "$RUN"' if request.run_exists else 'train "$FOLDER/recipe.yaml" --run-dir="$RUN"'
    yield f"-m trimaran {start}" + ("" if request.check else " --no-check") + " &"


def _container(site: SlurmSite) -> list[str]:
    given = {"container-image": site.container_image, "container-mounts": site.container_mounts}
    return [shlex.quote(f"--{name}={value}") for name, value in given.items() if value]


def _chain_lines(request: LaunchRequest) -> list[str]:
    """Return how the run goes on in another job, unless it was cancelled or asked to stop."""
    # Slurm puts the job back into the queue, or the rest of the chain waits for it; what is not needed is cancelled.
    if request.site.chain == "requeue":
        return [
            "# In any other state than RUNNING, Slurm itself ends the job or has requeued it.",
            "state=$(scontrol show job --oneliner \"$SLURM_JOB_ID\" | sed -n 's/.* JobState=\\([A-Z]*\\).*/\\1/p')",
            f'if [ "$code" = {EXIT_AGAIN} ] && [ "$asked" != stop ] && [ "$state" = RUNNING ]; then',
            '  scontrol requeue "$SLURM_JOB_ID" || say "$reason; it may not be requeued: submit it again"',
            "fi",
        ]
    if request.site.chain == "array":
        rest = 'scancel --state=PENDING "$SLURM_ARRAY_JOB_ID"'
    else:
        rest = f'scancel --state=PENDING --user="$(id -un)" --name={shlex.quote(slurm_name(request))}'
    return [f'if [ "$code" != {EXIT_AGAIN} ] || [ "$asked" = stop ]; then', f"  {rest}", "fi"]


def _on_gpu(request: LaunchRequest) -> bool:
    return not request.cluster.device.traits.shares_cores


def _cpus(request: LaunchRequest) -> int:
    return request.site.cpus_per_node or (0 if _on_gpu(request) else request.ranks_per_node)


def _output(request: LaunchRequest) -> str:
    """Return the file of the job's output: in the run directory, if that exists and sbatch can name it."""
    path, name = str(request.run_dir), "slurm-%A_%a.log" if request.site.chain == "array" else "slurm-%j.log"
    if not request.run_exists or "\\" in path:  # sbatch expands no %j in a name with a backslash
        return name
    return f"{path.replace('%', '%%')}/logs/{name}"
