"""Runs on a Slurm cluster: a batch script with one supervisor a node, submitted by sbatch.

Jobs, partitions and accounts are what Slurm's own commands say.
"""

import contextlib
import getpass
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trimaran.core import EXIT_AGAIN, UserError, did_you_mean, templated
from trimaran.launch.targets.slurm_end import read_ends
from trimaran.launch.targets.slurm_script import (
    SCRIPT,
    STOP_SIGNAL,
    SlurmSite,
    measured_stop_time,
    script_lines,
    stop_time,
    time_seconds,
)
from trimaran.launch.targets.target import (
    JobCommands,
    JobRecord,
    JobState,
    LaunchFiles,
    LaunchRequest,
    SiteCheck,
    State,
    ask_check,
    state_of_code,
)
from trimaran.runs import RunDirectory, bad_nodes_file, read_bad_nodes

ASK_SECONDS = 30.0
SUBMIT_SECONDS = 120.0
# A field begins with a capital after a blank; values such as Comment and Command may have blanks in them.
FIELD = re.compile(r"(?:^| )([A-Z][A-Za-z:/]*)=")
UNKNOWN_JOB = "Invalid job id"


def run_slurm(
    *command: str, folder: Path | None = None, seconds: float = ASK_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Return what one of Slurm's commands answers, whatever its exit code; raise UserError if it cannot be run."""
    try:
        return subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
        )
    except FileNotFoundError:
        raise UserError("L030.command-not-installed", where="--on slurm", command=command[0]) from None
    except subprocess.TimeoutExpired:
        raise UserError("L031.not-answered", where="--on slurm", command=command[0], seconds=seconds) from None


def ask_slurm(*command: str) -> str:
    """Return the output of one of Slurm's commands; raise UserError if it fails."""
    done = run_slurm(*command)
    if done.returncode != 0:
        raise UserError(
            "L031.command-failed",
            where="--on slurm",
            command=command[0],
            first_line=first_line(done.stderr) or done.returncode,
        )
    return done.stdout.strip()


def first_line(text: str) -> str:
    """Return the first line that says something, without the name of the command before it."""
    line = next((each for each in text.splitlines() if each.strip()), "")
    return re.sub(r"^(?:[a-z_]+: )?(?:error: )?", "", line.strip())


def parse_fields(line: str) -> dict[str, str]:
    """Return the fields of one line of `scontrol show --oneliner`; a value reaches to the next field."""
    found = list(FIELD.finditer(line))
    ends = [each.start() for each in found[1:]] + [len(line)]
    return {each.group(1): line[each.end() : end].strip() for each, end in zip(found, ends, strict=True)}


def show_jobs(job_ids: Sequence[str]) -> list[dict[str, str]]:
    """Return the fields of the jobs that Slurm still knows; a job array has one entry for each part of it."""
    found = []
    for job_id in job_ids:
        done = run_slurm("scontrol", "show", "job", "--oneliner", job_id)
        if done.returncode == 0:
            found += [parse_fields(line) for line in done.stdout.splitlines() if line.startswith("JobId=")]
        elif UNKNOWN_JOB not in done.stderr:
            raise UserError("L031.scontrol", where="--on slurm", first_line=first_line(done.stderr))
    return found


TOOLS = ("sbatch", "scontrol", "scancel", "sinfo", "srun")
SHARED_DISKS = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "wekafs", "ceph", "fuse.ceph", "glusterfs", "cifs", "9p"}
QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
MOUNTS = Path("/proc/mounts")
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class SlurmTarget:
    """Implements `target.Target` with Slurm's own commands."""

    name = "slurm"
    shares_disk = True
    site_model = SlurmSite

    def check(self, request: LaunchRequest | None, site: SlurmSite) -> list[SiteCheck]:
        """Return what was checked; the later checks need that the earlier ones have passed."""
        if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
            error = UserError("L030.slurm-commands", where="--on slurm", missing=", ".join(missing))
            return [SiteCheck(name="commands", found=error.what, error=error)]
        done = run_slurm("scontrol", "ping")
        if "UP" not in done.stdout:
            said = first_line(done.stderr) or first_line(done.stdout) or "scontrol ping: no answer"
            error = UserError("L031.slurmctld-not-answer", where="--on slurm", said=said)
            return [SiteCheck(name="slurmctld", found=error.what, error=error)]
        checks = [SiteCheck(name="slurmctld", found=first_line(done.stdout)), _check_partition(request, site)]
        if site.account:
            checks.append(ask_check("account", partial(_find_account, site.account)))
        if site.container_image:
            checks.append(ask_check("container", partial(_find_pyxis, site.container_image)))
        if request is not None:
            needed, limit, error = stop_time(request), time_seconds(site.time), None
            if limit is not None and limit <= needed.lead_seconds:
                error = UserError("L035.slurm-time-stop", where="slurm.time", limit=limit, needed=needed)
            checks += [SiteCheck(name="time to save", found=str(needed), error=error), _check_disk(request.run_dir)]
            if all(each.error is None for each in checks):
                checks.append(ask_check("sbatch --test-only", lambda: _try_submission(request, self.render(request))))
        return checks

    def render(self, request: LaunchRequest) -> LaunchFiles:
        """Return the batch script; a chain of jobs is submitted job by job."""
        site: SlurmSite = request.site
        many = site.chain_jobs if site.chain == "singleton" else 1
        bad = sorted(read_bad_nodes(bad_nodes_file(os.environ)))
        known_bad = [name for name in bad if NODE_NAME.fullmatch(name)]  # that are named as Slurm names nodes
        excluded = ",".join(name for name in (site.exclude, *known_bad) if name)
        files = {SCRIPT: script_lines(request, excluded=excluded)}
        return LaunchFiles(files=files, main=SCRIPT, submit=[["sbatch", SCRIPT]] * many)

    def submit(self, request: LaunchRequest, folder: Path) -> tuple[str, dict[str, Any]]:
        """Submit the script; the native id is that of the first job of a chain."""
        many = request.site.chain_jobs if request.site.chain == "singleton" else 1
        return _submit(folder, many=many, chain=request.site.chain)

    def submit_again(self, job: JobRecord) -> tuple[str, dict[str, Any]]:
        """Submit the script again, with a longer lead if the run has measured longer saves than the script knows."""
        options, leads = [], list[str]()
        known = measured_stop_time(Path(job.run_dir))
        with contextlib.suppress(OSError):
            lines = (Path(job.folder) / SCRIPT).read_text(encoding="utf-8").splitlines()
            leads = [line.rpartition("@")[2] for line in lines if line.startswith("#SBATCH --signal=")]
        if known is not None and known.lead_seconds > (int(leads[0]) if leads and leads[0].isdigit() else 0):
            options = [f"--signal=B:USR1@{known.lead_seconds}"]
        chain = str(job.details.get("chain", "requeue"))
        many = len(job.details.get("jobs", ())) or 1
        return _submit(Path(job.folder), *options, many=many, chain=chain)

    def state(self, job: JobRecord) -> JobState:
        """Return what Slurm says of the job, and what the run says of it once Slurm has forgotten it."""
        found = show_jobs(_job_ids(job))
        if not found:
            # How the job ended, as it wrote into the run directory.
            ends = [
                each for each in read_ends(RunDirectory(Path(job.run_dir))) if str(each.get("job")) in _job_ids(job)
            ]
            if not ends:
                return JobState(
                    state="unknown", reason="Slurm does not know the job any more, and the run has no record of it"
                )
            code = int(ends[-1].get("code", 1))
            return replace(state_of_code(code, reason=str(ends[-1].get("reason", ""))), native="")
        # The state of a job that Slurm knows. Only the comment of a job that has ended is the reason of its end.
        fields = min(found, key=stands_for_chain)
        native, (number, _, signal) = fields.get("JobState", ""), fields.get("ExitCode", "").partition(":")
        code = int(number) if number.isdigit() else None
        if code is not None and signal.isdigit() and int(signal):
            code = 128 + int(signal)  # as a shell would return
        given = {key: text for key, text in fields.items() if text not in ("None", "(null)")}
        reason, comment, nodes = (given.get(key, "") for key in ("Reason", "Comment", "NodeList"))
        known: dict[str, Any] = {"native": native, "nodes": ()}
        if nodes:
            done = run_slurm("scontrol", "show", "hostnames", nodes)
            known["nodes"] = tuple(done.stdout.split()) if done.returncode == 0 else (nodes,)
        if native in QUEUED:
            return JobState(state="queued", reason=reason, **known)
        if native in RUNNING:
            return JobState(state="running", reason=reason, **known)
        state: State = "stopped" if native == "CANCELLED" or code == EXIT_AGAIN else "failed"
        if native == "COMPLETED" and not code:
            state = "done"
        return JobState(state=state, exit_code=code, reason=comment or reason, **known)

    def stop(self, job: JobRecord) -> None:
        """Ask the job to save and end; jobs that have not started are cancelled."""
        found = show_jobs(_job_ids(job))
        states = [each.get("JobState", "") for each in found]
        if not any(state in QUEUED or state in RUNNING for state in states):
            raise UserError(
                "L039.job-ended",
                where=f"job {job.native_id}",
                states=", ".join(states) or "Slurm does not know it any more",
            )
        for each in found:
            if each.get("JobState", "") in QUEUED:
                _ask_for_job(job, "scancel", _name_of(each))
        for each in found:
            if each.get("JobState", "") in RUNNING:
                command = ["scancel", f"--signal={STOP_SIGNAL}", "--batch", _name_of(each)]
                # For a part of a job array, scancel 22.05 signals the job, tries again and reports that as an error.
                (run_slurm if each.get("ArrayTaskId") else partial(_ask_for_job, job))(*command)

    def commands(self, job: JobRecord) -> JobCommands:
        ids = _job_ids(job)
        # The file of the job's output, as its script names it; of an array, that of its first job.
        script = Path(job.folder) / SCRIPT
        lines = script.read_text(encoding="utf-8").splitlines() if script.is_file() else []
        words = [shlex.split(line)[1] for line in lines if line.startswith(("#SBATCH --output=", '#SBATCH "--output='))]
        pattern = words[0].partition("=")[2] if words else "slurm-%j.log"
        values = {"%%": "%", "%j": job.native_id, "%A": job.native_id, "%a": "1"}
        return JobCommands(
            follow=[
                "tail",
                "--follow=name",
                "--retry",
                "--lines=+1",
                str(Path(job.folder) / re.sub("%[%jAa]", lambda found: values[found.group()], pattern)),
            ],
            stop=["scancel", f"--signal={STOP_SIGNAL}", "--batch", *ids],
            resume=["sbatch", f"--chdir={job.folder}", f"{job.folder}/{SCRIPT}"],
        )


def _name_of(fields: Mapping[str, str]) -> str:
    """Return the name by which scancel knows a job, or one or several parts of a job array."""
    task = fields.get("ArrayTaskId", "").partition("%")[0]
    return f"{fields['ArrayJobId']}_[{task}]" if task else fields["JobId"]


def _job_ids(job: JobRecord) -> list[str]:
    return [str(each) for each in job.details.get("jobs", ())] or [job.native_id]


def _submit(folder: Path, *options: str, many: int, chain: str) -> tuple[str, dict[str, Any]]:
    jobs = []
    for _ in range(many):
        done = run_slurm("sbatch", "--parsable", *options, SCRIPT, folder=folder, seconds=SUBMIT_SECONDS)
        if done.returncode != 0:
            if jobs:  # a part of a chain is none
                run_slurm("scancel", *jobs)
            raise UserError(
                "L037.sbatch-refused-job-correct", where=str(folder / SCRIPT), first_line=first_line(done.stderr)
            )
        jobs.append(done.stdout.strip().partition(";")[0])  # ID;CLUSTER
    return jobs[0], {"jobs": jobs, "chain": chain}


def _ask_for_job(job: JobRecord, *command: str) -> None:
    done = run_slurm(*command)
    if done.returncode != 0:
        raise UserError(
            "L039.command-failed", where=f"job {job.native_id}", command=command[0], first_line=first_line(done.stderr)
        )


def stands_for_chain(fields: Mapping[str, str]) -> tuple[int, int]:
    """Return which job of a chain stands for all of them, the lowest first."""
    # It is the one that runs, else one that waits, else the one that finished the run, else the last that has run. The
    # rest of a chain is cancelled before it has run.
    state, number = fields.get("JobState", ""), fields.get("JobId", "").partition(" ")[0]
    kinds = [state in RUNNING, state in QUEUED, state == "COMPLETED", state != "CANCELLED"]
    return (kinds.index(True) if True in kinds else len(kinds), -int(number) if number.isdigit() else 0)


def _check_partition(request: LaunchRequest | None, site: SlurmSite) -> SiteCheck:
    named = [site.partition] if site.partition else []
    done = run_slurm("scontrol", "show", "partition", "--oneliner", *named)
    shown = [parse_fields(line) for line in done.stdout.splitlines() if line.startswith("PartitionName=")]
    if named:
        partition = shown[0] if shown and done.returncode == 0 else None
    else:
        partition = next((each for each in shown if each.get("Default") == "YES"), None)
    if partition is None:
        known = sorted(set(ask_slurm("sinfo", "--noheader", "--format=%R").split()))
        what = f"there is no partition '{site.partition}'{did_you_mean(site.partition, known)}"
        what = what if site.partition else "the cluster has no default partition"
        error = UserError(
            "L032", what, where="slurm.partition", fix=templated("use one of {known}", known=", ".join(known))
        )
        return SiteCheck(name="partition", found=error.what, error=error)
    name = partition["PartitionName"]
    found = f"{name}, {partition.get('TotalNodes', '?')} nodes, at most {partition.get('MaxTime', '?')}"
    if request is None:
        return SiteCheck(name="partition", found=found)
    where, error = "slurm.partition", None
    limits = [int(each) for key in ("TotalNodes", "MaxNodes") if (each := partition.get(key, "")).isdigit()]
    longest, asked = time_seconds(partition.get("MaxTime", "")), time_seconds(site.time)
    if partition.get("State", "UP") != "UP":
        error = UserError("L033.partition", where=where, name=name, state=partition["State"])
    elif limits and request.min_nodes > min(limits):
        error = UserError(
            "L033.partition-allows-nodes", where=where, name=name, least=min(limits), min_nodes=request.min_nodes
        )
    elif longest is not None and asked is not None and asked > longest:
        error = UserError(
            "L033.partition-allows-slurm", where="slurm.time", name=name, maxtime=partition["MaxTime"], time=site.time
        )
    elif not request.cluster.device.traits.shares_cores:
        listed = ask_slurm("sinfo", "--noheader", f"--partition={name}", "--format=%G")
        nodes = [re.findall(r"(?:^|,)gpu(?::[^:(,]+)?:(\d+)", line) for line in listed.splitlines()]
        gpus = max((sum(map(int, counts)) for counts in nodes), default=0)
        if gpus < request.ranks_per_node:
            error = UserError(
                "L033.nodes-partition-gpus", where=where, name=name, gpus=gpus, ranks_per_node=request.ranks_per_node
            )
    return SiteCheck(name="partition", found=found, error=error)


def _find_account(account: str) -> str:
    known: list[str] = []  # a cluster may keep no accounts
    if shutil.which("sacctmgr"):
        done = run_slurm("sacctmgr", "--noheader", "--parsable2", "show", "associations", f"user={getpass.getuser()}",
                         "format=account")  # fmt: skip
        known = sorted(set(done.stdout.split())) if done.returncode == 0 else []
    if not known:
        return f"{account}; the cluster does not tell whether it is valid"
    if account not in known:
        raise UserError(
            "L034.you-no-account",
            where="slurm.account",
            account=account,
            guess=did_you_mean(account, known),
            known=", ".join(known),
        )
    return account


def _find_pyxis(image: str) -> str:
    if "--container-image" not in run_slurm("srun", "--help").stdout:
        raise UserError("L036.srun-no-container", where="slurm.container_image")
    return f"pyxis, {image}"


def _check_disk(run_dir: Path) -> SiteCheck:
    """Return the kind of file system of the run; from here it cannot be told whether the nodes see it."""
    kind = "unknown"
    with contextlib.suppress(OSError):
        mounts = [line.split()[1:3] for line in MOUNTS.read_text().splitlines()]
        real = os.path.realpath(run_dir)
        holding = [(len(point), kind) for point, kind in mounts if f"{real}/".startswith(f"{point.rstrip('/')}/")]
        kind = max(holding, default=(0, "unknown"))[1]
    if kind in SHARED_DISKS:
        return SiteCheck(name="run directory", found=f"on {kind}")
    warning = f"warning: on {kind}, which may be this machine's own disk; every node must see {run_dir}"
    return SiteCheck(name="run directory", found=warning)


def _try_submission(request: LaunchRequest, files: LaunchFiles) -> str:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / files.main
        script.write_text(files.files[files.main], encoding="utf-8")
        done = run_slurm("sbatch", "--test-only", str(script), folder=Path(folder), seconds=SUBMIT_SECONDS)
    said = first_line(done.stderr)
    if done.returncode != 0:
        raise UserError("L037.sbatch-refused-job", where=f"{request.name}, {SCRIPT}", said=said)
    return said
