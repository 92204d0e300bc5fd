"""Launches a run with SkyPilot: a managed job, one supervisor on each node, with the run kept in a volume or bucket."""

import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from trimaran.core import EXIT_AGAIN, UserError
from trimaran.launch.supervise.node_options import RUN_TOKEN
from trimaran.launch.targets.site_file import Variables
from trimaran.launch.targets.target import (
    EXIT_CODES,
    JobCommands,
    JobRecord,
    JobState,
    LaunchFiles,
    LaunchRequest,
    SiteCheck,
    State,
    commented,
    job_name,
    node_command,
)

JOB_FILE, SCRIPT = "job.yaml", "node.sh"
BUCKET_PATH = "/trimaran-bucket"  # where the bucket is mounted on the nodes
STATES: dict[str, State] = {
    "PENDING": "queued", "SUBMITTED": "queued", "STARTING": "queued", "RUNNING": "running", "RECOVERING": "running",
    "WINDING_DOWN": "running", "CANCELLING": "running", "SUCCEEDED": "done", "CANCELLED": "stopped",
}  # fmt: skip
TOOL_SECONDS = 600.0  # for `sky` to answer; the first launch of an account starts a controller


class SkySection(BaseModel):
    """The defaults of a site for SkyPilot: the section `sky` of the site file. The first are resources in its terms."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    infra: str = Field("", description="Where to run: aws, gcp/us-central1, k8s/CONTEXT; empty: the cheapest.")
    accelerators: str = Field("", description="SkyPilot's name and number, H100:8; default: from the cluster.")
    cpus: str = Field("", description="vCPUs of a node, 32 or 32+; default: one for each rank of a CPU cluster.")
    memory: str = Field("", description="GB of memory of a node, 256 or 256+.")
    disk_size: int | None = Field(None, ge=1, description="GB of the disk of a node.")
    network_tier: str = Field("", description="best: the fastest network between nodes that the cloud has.")
    image_id: str = Field("", description="The image of the nodes, docker:IMAGE for a container.")
    use_spot: bool = Field(False, description="Use preemptible nodes; a preempted job continues from its newest copy.")

    setup: str = Field("", description="Shell commands that install Trimaran on a node; none where the image has it.")
    python: str = Field("python", description="The Python on the nodes that has Trimaran.")
    runs: str = Field("/tmp/trimaran-runs", description="The folder of run directories on the nodes, an absolute path.")
    volume: str = Field("", description="A SkyPilot volume that the nodes share, mounted at `runs`.")
    bucket: str = Field("", description="A bucket for copies of the run, s3://NAME or gs://NAME.")
    copy_seconds: int = Field(60, ge=1, description="How often complete checkpoints are copied to the bucket.")
    restarts: int = Field(3, ge=0, description="How often a job starts again after a fault of the run.")
    environment: Variables = Field(
        default_factory=dict, description="Environment variables of the supervisors and ranks. No secrets."
    )

    @model_validator(mode="after")
    def _one_storage(self) -> "SkySection":
        if self.volume and self.bucket:
            raise ValueError("name a volume or a bucket, not both")
        return self


class SkyTarget:
    """Implements `target.Target` with `sky jobs launch`. The files work without us, and `sky` need not be here."""

    name = "sky"
    site_model = SkySection
    shares_disk = False

    def check(self, request: LaunchRequest | None, site: Any) -> list[SiteCheck]:
        tool = shutil.which("sky")
        missing = None if tool else _missing()
        checks = [SiteCheck(name="sky", found=tool or "not on the path", error=missing)]
        if request is None:
            return checks
        storage = site.volume or site.bucket
        lost = UserError("L072.nothing-keeps-run", where="volume or bucket of sky")
        checks.append(SiteCheck(name="storage", found=storage or "none", error=None if storage else lost))
        program = site.setup or site.image_id
        bare = UserError("L073.nothing-installs-trimaran", where="setup or image_id of sky")
        checks.append(SiteCheck(name="program", found=program or "none", error=None if program else bare))
        return checks

    def render(self, request: LaunchRequest) -> LaunchFiles:
        files = {JOB_FILE: _job(request), SCRIPT: _script(request)}
        names = [*request.secrets, *([RUN_TOKEN] if _is_own_disk(request) else [])]
        passed = [word for name in names for word in ("--secret", name)]
        command = ["sky", "jobs", "launch", "--yes", "--detach-run", *passed, JOB_FILE]
        return LaunchFiles(files=files, main=JOB_FILE, submit=[command], executable=frozenset({SCRIPT}))

    def submit(self, request: LaunchRequest, folder: Path) -> tuple[str, dict[str, Any]]:
        return _submit({"command": [*self.render(request).submit[0]]}, folder)

    def submit_again(self, job: JobRecord) -> tuple[str, dict[str, Any]]:
        return _submit(job.details, Path(job.folder))

    def state(self, job: JobRecord) -> JobState:
        """Return the job's state. SkyPilot keeps the exit code of no managed job."""
        try:
            jobs = json.loads(_run(["jobs", "queue", "--all", "--output", "json"]))
            (found,) = [each for each in jobs if str(each["job_id"]) == job.native_id]
        except (ValueError, KeyError, TypeError):
            return JobState(state="unknown", reason="`sky jobs queue` does not list it")
        native = str(found["status"]).rpartition(".")[2]
        return JobState(
            state=STATES.get(native, "failed"), native=native, reason=str(found.get("failure_reason") or "")
        )

    def stop(self, job: JobRecord) -> None:
        _run(self.commands(job).stop[1:])

    def commands(self, job: JobRecord) -> JobCommands:
        return JobCommands(
            follow=["sky", "jobs", "logs", job.native_id],
            stop=["sky", "jobs", "cancel", "--yes", "--graceful", job.native_id],
            resume=job.details["command"],
        )


def _is_own_disk(request: LaunchRequest) -> bool:
    return request.num_nodes > 1 and not request.site.volume


def _job(request: LaunchRequest) -> str:
    site: SkySection = request.site
    is_cpu = request.cluster.device.traits.shares_cores
    resources = {
        "infra": site.infra,
        "accelerators": site.accelerators
        or ("" if is_cpu else f"{request.cluster.device.name}:{request.ranks_per_node}"),
        "cpus": site.cpus or (f"{request.ranks_per_node}+" if is_cpu else ""),
        "memory": site.memory,
        "disk_size": site.disk_size,
        "network_tier": site.network_tier,
        "image_id": site.image_id,
        "use_spot": site.use_spot,
        "job_recovery": {"max_restarts_on_errors": site.restarts, "recover_on_exit_codes": [EXIT_AGAIN]},
    }
    task = {
        "name": job_name(request.name),
        "num_nodes": request.num_nodes,
        "resources": {name: value for name, value in resources.items() if value},
        "workdir": ".",
        "envs": dict(site.environment),
        "file_mounts": {BUCKET_PATH: {"source": site.bucket, "mode": "MOUNT_CACHED"}} if site.bucket else {},
        "volumes": {str(PurePosixPath(site.runs)): site.volume} if site.volume else {},
        **({"setup": site.setup} if site.setup else {}),
        "run": f"exec bash {SCRIPT}\n",
    }
    comment = (
        f"# Run {commented(request.name)} as a managed job of SkyPilot. `trimaran launch --on sky` wrote this file.\n"
    )
    if _is_own_disk(request):
        comment += f"# The nodes share a secret, which `sky` reads from your environment:\n# export {RUN_TOKEN}="
        comment += "$(python -c 'import secrets; print(secrets.token_urlsafe(32))')\n"
    tree = {name: value for name, value in task.items() if value != {}}
    return comment + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _script(request: LaunchRequest) -> str:
    site: SkySection = request.site
    nodes = request.num_nodes  # SkyPilot replaces all nodes of a job, or none
    words = node_command(request, python=site.python, launch_folder=".", nodes=nodes)
    command = shlex.join(words)
    if nodes > 1:
        command += ' --head="$head"'
    if _is_own_disk(request):
        command += ' --own-disk --node-name="node-$rank"'
    quoted = shlex.quote(str(request.run_dir))
    kept = shlex.quote(f"{BUCKET_PATH}/{request.run_dir.name}") if site.bucket else ""
    storage = f'kept={kept}/"node-$rank"\n{COPIES}' if site.bucket else ""
    body = WITH_COPIES.format(seconds=site.copy_seconds) if site.bucket else 'exec "${command[@]}"\n'
    return (
        "#!/usr/bin/env bash\n# One node of the run; SkyPilot runs this on every node, in this folder.\n"
        f"{EXIT_CODES}\nset -u -o pipefail\n\n"
        "rank=$SKYPILOT_NODE_RANK\n"
        "head=$(printf '%s\\n' \"$SKYPILOT_NODE_IPS\" | head -n 1)\n"
        f"run={quoted}\n{storage}"
        f'command=({command})\n\nmkdir -p -- "$(dirname -- "$run")"\n{body}'
    )


# A bucket has neither the locks nor the permissions of a disk, so the run is on the node's disk, and copies are kept.
# Drafts of checkpoints, and the lease with the run's token, are not copied.
COPIES = r"""
# Copies what is complete: checkpoints with their manifest last, then the run's other files.
keep_copy() {
  local step name
  mkdir -p -- "$kept/checkpoints"
  for step in "$run"/checkpoints/step-*; do
    name=${step##*/}
    if [ ! -d "$step" ] || [ -e "$kept/checkpoints/$name/manifest.json" ]; then continue; fi
    mkdir -p -- "$kept/checkpoints/$name"
    find "$step" -mindepth 1 -maxdepth 1 ! -name manifest.json -exec cp -R -u -- {} "$kept/checkpoints/$name/" \;
    if [ -e "$step/manifest.json" ]; then cp -- "$step/manifest.json" "$kept/checkpoints/$name/"; fi
  done
  find "$run" -mindepth 1 -maxdepth 1 ! -name checkpoints ! -name lease ! -type s -exec cp -R -u -- {} "$kept/" \;
  for step in "$kept"/checkpoints/step-*; do
    if [ ! -d "$run/checkpoints/${step##*/}" ]; then rm -rf -- "$step"; fi
  done
}

# After a preemption the nodes are new: they continue from their copies.
restore_copy() {
  if [ -e "$run" ] || [ ! -e "$kept/plan.json" ]; then return; fi
  mkdir -p -- "$run"
  cp -R -- "$kept"/. "$run"/
}

"""
WITH_COPIES = r"""restore_copy
"${{command[@]}}" &
node=$!
trap 'kill -TERM "$node" 2>/dev/null' TERM INT
while kill -0 "$node" 2>/dev/null; do
  sleep {seconds} & pause=$!
  wait -n "$node" "$pause"
  kill "$pause" 2>/dev/null
  keep_copy 2>/dev/null
done
wait "$node"
code=$?
keep_copy
exit "$code"
"""


def _submit(details: dict[str, Any], folder: Path) -> tuple[str, dict[str, Any]]:
    """Run `sky jobs launch`. The run's token is new for each job; it is passed in the environment only."""
    command: Sequence[str] = details["command"]
    token = {RUN_TOKEN: os.environ.get(RUN_TOKEN) or secrets.token_urlsafe(32)} if RUN_TOKEN in command else {}
    text = _run(command[1:], folder=folder, variables=token)
    named = re.search(r"Job ID: *(\d+)", text)
    if named is None:
        raise UserError("L071.sky-jobs-launch", where=str(folder))
    return named[1], dict(details)


def _run(arguments: Sequence[str], *, folder: Path | None = None, variables: dict[str, str] | None = None) -> str:
    tool = shutil.which("sky")
    if tool is None:
        raise _missing()
    try:
        done = subprocess.run(
            [tool, *arguments], cwd=folder, env=os.environ | (variables or {}), capture_output=True, text=True,
            check=False, timeout=TOOL_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError("L071.sky-took", where="sky", arguments=arguments[0], tool_seconds=TOOL_SECONDS) from None
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise UserError(
            "L071.sky-failed", where="sky", arguments=" ".join(arguments[:2]), lines=(lines or ["no reason"])[-1][:300]
        )
    return done.stdout + done.stderr


def _missing() -> UserError:
    return UserError("L070.command-sky", where="--on sky")
