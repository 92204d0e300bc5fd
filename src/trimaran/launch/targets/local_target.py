"""The local target: a run on this machine, also one of several nodes, each with a loopback address of its own."""

import os
import shlex
import signal
import socket
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from trimaran.core import UserError, show_bytes
from trimaran.launch.supervise.detached import DetachedProcess
from trimaran.launch.targets.target import (
    EXIT_CODES,
    SHARED_FUNCTIONS,
    JobCommands,
    JobRecord,
    JobState,
    LaunchFiles,
    LaunchRequest,
    SiteCheck,
    commented,
    node_command,
    state_of_process,
)
from trimaran.machine import detect

SCRIPT = "run.sh"
PROCESS = "launch"  # the name of the detached script, whose output is RUN/logs/launch.log
FIRST_ADDRESS = 2  # 127.0.0.2; 127.0.0.1 is left to other programs
MAX_NODES = 250


class LocalSite(BaseModel):
    """The site's section for this machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: str = Field(default="", description="the Python that has Trimaran; the one that runs `trimaran launch`")
    runs: str = Field(default="", description="the folder of new run directories; runs/ in the current folder")


class LocalTarget:
    """This machine. The run outlives the terminal that it was launched from."""

    name = "local"
    site_model = LocalSite
    shares_disk = True

    def check(self, request: LaunchRequest | None, site: LocalSite) -> list[SiteCheck]:
        """Look at the devices, the loopback addresses and the disk. The supervisor makes the doctor's checks."""
        here = detect(visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"))
        if request is None:
            return [SiteCheck(name="devices", found=str(here))]
        wanted, is_gpu, error = request.cluster, not request.cluster.device.traits.shares_cores, None
        if is_gpu and (here.device.kind != wanted.device.kind or here.world_size < wanted.world_size):
            error = UserError("A007.run-needs-but-machine", where="cluster", wanted=wanted, here=here)
        folder = next(each for each in (request.run_dir, *request.run_dir.parents) if each.is_dir())
        status, refusal = os.statvfs(folder), None
        free = f"{show_bytes(status.f_bavail * status.f_frsize)} free at {folder}"
        try:
            NamedTemporaryFile(dir=folder).close()
        except OSError as failure:
            refusal = UserError("D003.run-directory", where=str(folder), reason=failure.strerror)
        checks = [
            SiteCheck(name="devices", found=str(here), error=error),
            SiteCheck(name="disk", found=free, error=refusal),
        ]
        addresses = addresses_of(request) if request.num_nodes > 1 else []
        refused = None
        for address in addresses:
            try:
                socket.create_server((address, 0)).close()
            except OSError as failure:
                refused = UserError(
                    "L012.node-cannot-listen", where="this machine", address=address, reason=failure.strerror
                )
                addresses = [address]
                break
        if addresses:
            checks.append(SiteCheck(name="addresses", found=", ".join(addresses), error=refused))
        return checks

    def render(self, request: LaunchRequest) -> LaunchFiles:
        text, addresses = f"#!/usr/bin/env bash\n# Run {commented(request.name)} on this machine", addresses_of(request)
        python, folder = request.site.python or sys.executable, "" if request.run_exists else "."
        command = node_command(request, python=python, launch_folder=folder, nodes=len(addresses), address="ADDRESS")
        if len(addresses) == 1:
            text += (
                ". `trimaran launch --on local` wrote this file.\n# Started again, it continues from the newest state. "
                f"SIGTERM or Ctrl-C stops it with a checkpoint.\n{EXIT_CODES}\nexec {shlex.join(command)}\n"
            )
        else:
            command.remove("--address=ADDRESS")
            logs = str(request.run_dir / "logs" if request.run_exists else ".")
            text += (
                f" as {len(addresses)} nodes, each with {request.ranks_per_node} ranks and its own loopback address.\n"
                "# `trimaran launch --on local` wrote this file. Started again, it continues from the newest state.\n"
                "# SIGTERM or Ctrl-C stops it with a checkpoint, a second Ctrl-C at once. The nodes' output is also "
                f"in\n# node-ADDRESS.log.\n{EXIT_CODES}\nset -u -o pipefail\n\naddresses=({' '.join(addresses)})\n"
                f"logs={shlex.quote(logs)}\ncommand=({shlex.join(command)})\n{SHARED_FUNCTIONS}{BODY}"
            )
        return LaunchFiles(files={SCRIPT: text}, main=SCRIPT, submit=[["bash", SCRIPT]], executable=frozenset({SCRIPT}))

    def submit(self, request: LaunchRequest, folder: Path) -> tuple[str, dict[str, Any]]:
        return _start(DetachedProcess(folder, PROCESS, logs=request.run_dir / "logs"))

    def submit_again(self, job: JobRecord) -> tuple[str, dict[str, Any]]:
        return _start(_process(job))

    def state(self, job: JobRecord) -> JobState:
        return state_of_process(_process(job))

    def stop(self, job: JobRecord) -> None:
        _process(job).send(signal.SIGTERM)

    def commands(self, job: JobRecord) -> JobCommands:
        process = _process(job)
        files = [f"--folder={process.folder}", f"--logs={process.log.parent}"]
        detached = [sys.executable, "-m", "trimaran.launch.supervise.detached"]
        return JobCommands(
            follow=[*detached, "follow", PROCESS, *files],
            stop=[*detached, "stop", PROCESS, *files],
            resume=["bash", str(Path(job.folder, SCRIPT))],
        )


def addresses_of(request: LaunchRequest) -> list[str]:
    """Return the loopback address of each node."""
    if request.num_nodes > MAX_NODES:
        raise UserError("L011.nodes-too-many", where="cluster", num_nodes=request.num_nodes, max_nodes=MAX_NODES)
    return [f"127.0.0.{FIRST_ADDRESS + node}" for node in range(request.num_nodes)]


# Supervisors treat further SIGTERMs as the first one, and get a Ctrl-C of the terminal themselves.
BODY = r"""
on_signal() {
  presses=$((presses + 1))
  local signal=TERM
  if [ "$1" = INT ] && [ "$presses" -gt 1 ]; then signal=QUIT; fi
  kill -"$signal" "${nodes[@]}" 2>/dev/null
}

nodes=() codes=() presses=0
trap 'on_signal INT' INT
trap 'on_signal TERM' TERM
for address in "${addresses[@]}"; do
  "${command[@]}" --address="$address" > >(trap '' INT TERM; tee -a -- "$logs/node-$address.log" |
    with_prefix "$address") 2>&1 &
  nodes+=($!)
done
for node in "${nodes[@]}"; do
  wait "$node"
  code=$?
  while kill -0 "$node" 2>/dev/null; do wait "$node"; code=$?; done  # a signal ended the wait, not the node
  codes+=("$code")
done
exit "$(choose_code "${codes[@]}")"
"""


def _start(process: DetachedProcess) -> tuple[str, dict[str, Any]]:
    script = str(process.folder / SCRIPT)
    found = process.start(["bash", script])
    if "error" in found or found["state"] == "none":
        raise UserError(
            "L028.script-not-started", where=f"bash {script}", found=found.get("error", "no process"), log=process.log
        )
    return f"{found.get('pid', 0)}-{found.get('started', 0)}", {}


def _process(job: JobRecord) -> DetachedProcess:
    return DetachedProcess(Path(job.folder), PROCESS, logs=Path(job.run_dir, "logs"))
