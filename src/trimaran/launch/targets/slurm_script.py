"""The batch script of a run under Slurm: options, one supervisor a node, and what happens when the job ends."""

import hashlib
import shlex
import sys
import textwrap
from collections.abc import Iterator

from trimaran.core import EXIT_AGAIN, UserError
from trimaran.launch.targets.node_command import node_command
from trimaran.launch.targets.save_time import stop_time
from trimaran.launch.targets.slurm_site import SlurmSite
from trimaran.launch.targets.target import LaunchRequest, job_name

SCRIPT = "job.sbatch"
MAX_LINE = 118
REPEAT_SECONDS = 20  # between signals to a step that has not ended
MAX_LEAD_SECONDS = 65535  # of --signal
STOP_SIGNAL = "USR2"  # saves and ends; USR1 saves and goes on in the next job


def script_lines(request: LaunchRequest, *, excluded: str = "") -> str:
    """Return the batch script. `excluded` are the nodes to avoid, as Slurm lists them."""
    site: SlurmSite = request.site
    _refuse_control_characters(request)
    parts = [
        "#!/bin/bash",
        *textwrap.wrap(_describe(request), MAX_LINE, initial_indent="# ", subsequent_indent="#   "),
        "# Submit it with `sbatch job.sbatch`, from the folder that it is in.",
        *(f"#SBATCH {quote_option(option)}" for option in batch_options(request, excluded=excluded)),
        *_signal_lines(request),
        "",
        *_variable_lines(request),
        *_trap_lines(site),
        *_setup_lines(site),
        *_step_lines(request),
        *_end_lines(site),
        *(_requeue_lines() if site.chain == "requeue" else _chain_lines(request)),
        'exit "$code"',
    ]
    return "\n".join(parts) + "\n"


def batch_options(request: LaunchRequest, *, excluded: str = "") -> list[str]:
    """Return the options of sbatch, without `--signal`."""
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


def _describe(request: LaunchRequest) -> str:
    nodes = "1 node" if request.num_nodes == 1 else f"{request.num_nodes} nodes"
    if request.min_nodes < request.max_nodes:
        nodes = f"{request.min_nodes} to {request.max_nodes} nodes"
    ranks = "1 rank" if request.ranks_per_node == 1 else f"{request.ranks_per_node} ranks each"
    return f"Run {job_name(request.name)}: {nodes} with {ranks}, plan {request.plan}"


def _signal_lines(request: LaunchRequest) -> list[str]:
    """Return the option `--signal`, and how its lead was computed."""
    needed = stop_time(request)
    return [
        "# Before the time limit the job needs time to save: " + str(needed) + ".",
        "# Slurm looks at time limits about once a minute; the last term is for that.",
        f"#SBATCH --signal=B:USR1@{min(needed.lead_seconds, MAX_LEAD_SECONDS)}",
    ]


def _variable_lines(request: LaunchRequest) -> list[str]:
    return [
        f"RUN={shlex.quote(str(request.run_dir))}",
        *([] if request.run_exists else ["FOLDER=$PWD  # with recipe.yaml and plan.json"]),
        f"PYTHON={shlex.quote(python_of(request.site))}",
        "",
    ]


def _trap_lines(site: SlurmSite) -> list[str]:
    """Return the handlers of the batch shell. Slurm signals only it, and the step only if the whole job must end."""
    if site.runner == "torchrun":  # which would kill its ranks; rank 0 reads the stop file
        stop = 'touch "$RUN/stop"'
    else:
        stop = 'scancel --quiet --signal=TERM "$SLURM_JOB_ID" || touch "$RUN/stop"'
    return [
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
    ]


def _setup_lines(site: SlurmSite) -> list[str]:
    return [
        *site.setup,
        "# Names of nodes may not resolve on the nodes: use the address that Slurm itself uses.",
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "head=$(scontrol show node --oneliner \"$head\" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')",
        "",
    ]


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
    """Return the options of pyxis."""
    given = {"container-image": site.container_image, "container-mounts": site.container_mounts}
    return [shlex.quote(f"--{name}={value}") for name, value in given.items() if value]


def _end_lines(site: SlurmSite) -> list[str]:
    """Return how the job learns why it ended; the Python of a container is run inside of it."""
    inside = ["srun", "--nodes=1", "--ntasks=1", *_container(site), ""] if site.container_image else []
    return [
        "trap '' USR1 USR2 TERM",
        "# What the coordinator wrote has the last word: srun returns the largest exit code of its tasks.",
        "if { read -r found && read -r reason; } < <( \\",
        f'  {" ".join(inside)}"$PYTHON" -m trimaran.launch.targets.slurm_end "$RUN" \\',
        '  --code="$code" --since="$began" --asked="$asked"); then',
        "  code=$found",
        '  say "$reason"',
        "fi",
    ]


def _requeue_lines() -> list[str]:
    """Return how the job goes on: Slurm puts it back into the queue, unless it was cancelled or asked to stop."""
    return [
        "# In any other state than RUNNING, Slurm itself ends the job or has requeued it.",
        "state=$(scontrol show job --oneliner \"$SLURM_JOB_ID\" | sed -n 's/.* JobState=\\([A-Z]*\\).*/\\1/p')",
        f'if [ "$code" = {EXIT_AGAIN} ] && [ "$asked" != stop ] && [ "$state" = RUNNING ]; then',
        '  scontrol requeue "$SLURM_JOB_ID" || say "$reason; it may not be requeued: submit it again"',
        "fi",
    ]


def _chain_lines(request: LaunchRequest) -> list[str]:
    """Return how the chain ends: unless the next job is to go on, those that wait are cancelled."""
    if request.site.chain == "array":
        rest = 'scancel --state=PENDING "$SLURM_ARRAY_JOB_ID"'
    else:
        rest = f'scancel --state=PENDING --user="$(id -un)" --name={shlex.quote(slurm_name(request))}'
    return [
        f'if [ "$code" != {EXIT_AGAIN} ] || [ "$asked" = stop ]; then',
        f"  {rest}",
        "fi",
    ]


def python_of(site: SlurmSite) -> str:
    """Return the Python of the nodes."""
    return site.python or sys.executable


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


def _refuse_control_characters(request: LaunchRequest) -> None:
    if any(ord(character) < 32 for character in str(request.run_dir)):
        raise UserError("L038", "the path of the run has a line break or another control character",
                        where=f"--run-dir {str(request.run_dir)!r}", fix="choose a path without it")  # fmt: skip
