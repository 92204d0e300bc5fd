"""Launches a run on a Ray cluster: a job with one supervisor actor on each node; see `ray_job`, which runs there."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from trimaran.core import EXIT_AGAIN, UserError
from trimaran.launch.supervise.detached import DetachedProcess
from trimaran.launch.targets.site_file import Variables
from trimaran.launch.targets.target import (
    JobCommands,
    JobRecord,
    JobState,
    LaunchFiles,
    LaunchRequest,
    SiteCheck,
    State,
    job_name,
    node_command,
    state_of_process,
)

LOCAL = "local"
JOB_FILE, SCRIPT = "job.json", "ray_job.py"
DRIVER = "driver"  # the name of the detached driver of a local cluster, whose output is driver.log
NO_AGENT = "No available agent"  # of a cluster that has just started: "please try again later"
AGENT_SECONDS, AGENT_POLL_SECONDS = 60.0, 2.0
STOP_SECONDS = 60.0  # beside the time of a checkpoint: for the step that is under way, and for Ray
STATES: dict[str, State] = {"PENDING": "queued", "RUNNING": "running", "STOPPED": "stopped", "SUCCEEDED": "done",
                            "FAILED": "failed"}  # fmt: skip


class RaySection(BaseModel):
    """The defaults of a site for Ray: the section `ray` of the site file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: Annotated[str, Field(max_length=300)] = Field(
        "", description="Where jobs are submitted, http://HEAD:8265; empty: RAY_ADDRESS; local: start a cluster here."
    )
    runs: Annotated[str, Field(max_length=1000)] = Field(
        "", description="The folder of new run directories, as the nodes see it."
    )
    shared_disk: bool = Field(True, description="Run directories are on a disk that the nodes and this machine share.")
    python: Annotated[str, Field(max_length=300)] = Field(
        "", description="The Python of the nodes, a path; empty: that of Ray's workers."
    )
    cpus_per_node: Annotated[float, Field(ge=0)] | None = Field(
        None, description="CPUs that a node's supervisor and ranks reserve; default: one for each rank."
    )
    resources: dict[str, float] = Field(
        default_factory=dict, description="Other resources that each node must have: {rack-1: 0.001}."
    )
    node_addresses: tuple[Annotated[str, Field(max_length=60)], ...] = Field(
        (), description="IP addresses of the supervisors, one for each node; default: each finds its own."
    )
    wait_seconds: Annotated[float, Field(gt=0)] = Field(
        600.0, description="How long the job waits until the cluster has enough nodes."
    )
    autoscale: bool = Field(False, description="The cluster starts nodes on demand: too few nodes are no mistake.")
    allow_unauthenticated: bool = Field(
        False, description="Use a cluster without token authentication, on which anybody can run commands."
    )
    environment: Variables = Field(
        default_factory=dict, description="Environment variables of the supervisors and ranks. No secrets."
    )


class RayTarget:
    """Implements `target.Target` with Ray's job submission; a local cluster lives as long as its driver process."""

    name = "ray"
    site_model = RaySection
    shares_disk = True

    def check(self, request: LaunchRequest | None, site: Any) -> list[SiteCheck]:
        if find_spec("ray") is None:
            return [SiteCheck(name="ray", found="not installed", error=_missing())]
        checks = [SiteCheck(name="ray", found=f"Ray {import_module('ray').__version__}")]
        if site.address == LOCAL:
            error = None
            if request is not None and not request.cluster.device.traits.shares_cores and request.num_nodes > 1:
                error = UserError("L061.local-ray-cluster", where="address of ray", num_nodes=request.num_nodes)
            return [*checks, SiteCheck(name="cluster", found="a local one is started", error=error)]
        try:
            return [*checks, *_check_cluster(request, site)]
        except UserError as error:
            return [*checks, SiteCheck(name="cluster", found="not reachable", error=error)]

    def render(self, request: LaunchRequest) -> LaunchFiles:
        site: RaySection = request.site
        wait_seconds = request.save_seconds * 2 + STOP_SECONDS
        command = node_command(request, python="", launch_folder="" if request.run_exists else ".")
        resources = _resources(request)
        # Ray would give every rank the threads of the whole node.
        threads = max(1, int(resources["CPU"] // request.ranks_per_node))
        addresses = list(site.node_addresses)
        if not addresses and site.address == LOCAL and request.max_nodes > 1:
            # All nodes of a local cluster have the IP address of this machine.
            addresses = [f"127.0.0.{number}" for number in range(2, request.max_nodes + 2)]
        job = {
            "name": job_name(request.name),
            "run": str(request.run_dir),
            "address": LOCAL if site.address == LOCAL else "",
            "nodes": request.num_nodes,
            "min_nodes": request.min_nodes,
            "max_nodes": request.max_nodes,
            "resources_per_node": resources,
            "python": site.python,
            "arguments": command[1:],
            "node_addresses": addresses,
            "environment": {"OMP_NUM_THREADS": str(threads), **site.environment},
            "wait_seconds": site.wait_seconds,
            "stop_seconds": wait_seconds,
        }
        script = Path(__file__).with_name(SCRIPT).read_text(encoding="utf-8")
        run = [site.python or "python", SCRIPT, JOB_FILE]
        if site.address == LOCAL:
            submit = ["env", "RAY_AUTH_MODE=token", *run]
        else:
            stop = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(int(wait_seconds) + 10)}}
            address = [f"--address={site.address}"] if site.address else []
            submit = ["ray", "job", "submit", *address, "--working-dir=.", f"--runtime-env-json={json.dumps(stop)}",
                      "--no-wait", "--", *run]  # fmt: skip
        files = {JOB_FILE: json.dumps(job, indent=1, ensure_ascii=False) + "\n", SCRIPT: script}
        return LaunchFiles(files=files, main=JOB_FILE, submit=[submit])

    def submit(self, request: LaunchRequest, folder: Path) -> tuple[str, dict[str, Any]]:
        (command,) = self.render(request).submit
        details = {"command": list(command), "address": request.site.address, "name": job_name(request.name)}
        return _submit(details, folder)

    def submit_again(self, job: JobRecord) -> tuple[str, dict[str, Any]]:
        return _submit(job.details, Path(job.folder))

    def state(self, job: JobRecord) -> JobState:
        if job.details["address"] == LOCAL:
            return state_of_process(_driver(Path(job.folder)))
        try:
            info = _client(job).get_job_info(job.native_id)
        except Exception as error:  # whatever the HTTP client raises: the cluster may be gone
            return JobState(state="unknown", reason=_first_line(error))
        code = info.driver_exit_code
        state = "stopped" if code == EXIT_AGAIN else STATES.get(str(info.status), "unknown")
        reason = "" if state in ("running", "done") else _first_line(info.message or "")
        return JobState(state=state, native=str(info.status), reason=reason, exit_code=code)

    def stop(self, job: JobRecord) -> None:
        if job.details["address"] == LOCAL:
            _driver(Path(job.folder)).send(signal.SIGTERM)
            return
        try:
            _client(job).stop_job(job.native_id)
        except Exception as error:
            raise _tool_error(f"job {job.native_id} cannot be stopped: {_first_line(error)}") from None

    def commands(self, job: JobRecord) -> JobCommands:
        if job.details["address"] == LOCAL:
            log, pid = str(_driver(Path(job.folder)).log), str(job.details.get("pid", ""))
            return JobCommands(follow=["tail", "-f", log], stop=["kill", "-TERM", pid], resume=job.details["command"])
        address = [f"--address={job.details['address']}"] if job.details["address"] else []
        return JobCommands(
            follow=["ray", "job", "logs", *address, "--follow", job.native_id],
            stop=["ray", "job", "stop", *address, "--no-wait", job.native_id],
            resume=job.details["command"],
        )


def _resources(request: LaunchRequest) -> dict[str, float]:
    site: RaySection = request.site
    cpus = request.ranks_per_node if site.cpus_per_node is None else site.cpus_per_node
    gpus = {} if request.cluster.device.traits.shares_cores else {"GPU": request.ranks_per_node}
    return {"CPU": cpus, **gpus, **site.resources}


def _check_cluster(request: LaunchRequest | None, site: RaySection) -> list[SiteCheck]:
    """Return the checks of a running cluster: it answers, it asks for a token, and it has enough nodes."""
    address = site.address or os.environ.get("RAY_ADDRESS", "")
    if not address:
        raise UserError("L061.no-ray-cluster", where="address of ray")
    try:
        version = import_module("ray.job_submission").JobSubmissionClient(address).get_version()
    except Exception as error:
        raise UserError("L061.ray-cluster", where=address, first_line=_first_line(error)) from None
    if not address.startswith("http"):
        has_token = os.environ.get("RAY_AUTH_MODE") == "token"
    else:  # send a request without one
        answer = import_module("requests").get(f"{address.rstrip('/')}/api/jobs/", timeout=10)
        has_token = answer.status_code in (401, 403)
    error = UserError("L062.ray-cluster", where=address)
    is_refused = not has_token and not site.allow_unauthenticated
    checks = [
        SiteCheck(name="cluster", found=f"{address} (job API {version})"),
        SiteCheck(name="authentication", found="token" if has_token else "off", error=error if is_refused else None),
    ]
    return checks if request is None else [*checks, _check_nodes(address, request)]


def _check_nodes(address: str, request: LaunchRequest) -> SiteCheck:
    """Return whether enough nodes have what the run needs of each; what other jobs use is not subtracted."""
    needed = _resources(request)
    try:
        nodes = import_module("ray.util.state").list_nodes(address=address, limit=10_000)
    except Exception as error:
        return SiteCheck(name="nodes", found=f"not listed: {_first_line(error)}")
    alive = [node for node in nodes if node.state == "ALIVE"]
    fit = [node for node in alive if all(node.resources_total.get(name, 0) >= each for name, each in needed.items())]
    text = ", ".join(f"{value:g} {name}" for name, value in needed.items())
    found = f"{len(fit)} of {len(alive)} nodes have {text}"
    error = UserError("L063.run-needs-nodes", where=address, min_nodes=request.min_nodes, text=text, found=found)
    is_enough = len(fit) >= request.min_nodes or request.site.autoscale
    return SiteCheck(name="nodes", found=found, error=None if is_enough else error)


def _submit(details: dict[str, Any], folder: Path) -> tuple[str, dict[str, Any]]:
    if details["address"] == LOCAL:
        # Start the driver of a local cluster in the background.
        *variables, python = details["command"][:3]
        python = sys.executable if python == "python" else python
        found = _driver(folder).start([*variables, python, str(folder / SCRIPT), str(folder / JOB_FILE)])
        if "error" in found or found["state"] == "none":
            raise _tool_error(f"the driver was not started: {found.get('error', 'no process')}")
        return f"{details['name']}-{found.get('pid', 0)}-{found.get('started', 0)}", details | {
            "pid": found.get("pid", 0)
        }
    tool, *arguments = details["command"]
    native_id = f"{details['name']}-{time.time_ns() // 1_000_000:x}"
    arguments.insert(arguments.index("--no-wait"), f"--submission-id={native_id}")
    beside = Path(sys.executable).with_name(tool)  # Python, or else the one on the path
    tool, until = str(beside) if beside.exists() else shutil.which(tool) or tool, time.monotonic() + AGENT_SECONDS
    while True:
        try:
            done = subprocess.run([tool, *arguments], cwd=folder, capture_output=True, text=True, check=False)
        except OSError as error:
            raise _tool_error(f"ray cannot be run: {error.strerror}") from None
        if not done.returncode:
            return native_id, details
        said = _first_line(done.stderr or done.stdout)
        if NO_AGENT not in said or time.monotonic() > until:
            raise _tool_error(f"`ray job submit` failed: {said}")
        time.sleep(AGENT_POLL_SECONDS)


def _driver(folder: Path) -> DetachedProcess:
    return DetachedProcess(folder, DRIVER)


def _client(job: JobRecord) -> Any:
    if find_spec("ray") is None:
        raise _missing()
    return import_module("ray.job_submission").JobSubmissionClient(job.details["address"] or None)


def _missing() -> UserError:
    return UserError("L060.ray-package", where="--on ray")


def _tool_error(what: str) -> UserError:
    return UserError("L064", what, where="ray", fix="`trimaran launch --check --on ray` names what is wrong")


def _first_line(text: object) -> str:
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(text)).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["no reason given"])[-1 if errors else 0][:300]
