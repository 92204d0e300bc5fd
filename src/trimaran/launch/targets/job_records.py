"""The record of launched jobs: one JSON file for each, in the user's state folder."""

import json
import os
import platform
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from trimaran.core import UserError, did_you_mean
from trimaran.core.regular_files import read_regular_bytes
from trimaran.launch.targets.target import JobRecord, LaunchRequest

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
    """Return the record of a job that was just submitted."""
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
    unfinished = folder / f".{job.id}.{os.getpid()}"
    unfinished.write_text(json.dumps(asdict(job), indent=1), encoding="utf-8")
    unfinished.replace(folder / f"{job.id}.json")


def read_records(folder: Path) -> list[JobRecord]:
    """Return all jobs, the newest first. Files that are not records are left out."""
    found = [_read(path) for path in sorted(folder.glob("*.json"))] if folder.is_dir() else []
    return sorted((job for job in found if job is not None), key=lambda job: -job.submitted)


def find_record(folder: Path, wanted: str) -> JobRecord:
    """Return the job with this id, native id or name, the newest if several have it; raise UserError if none has."""
    jobs = read_records(folder)
    for job in jobs:
        if wanted in (job.id, job.native_id, job.name, job.run_dir):
            return job
    known = [job.id for job in jobs]
    raise UserError("L002", f"there is no job '{wanted}'{did_you_mean(wanted, known)}", where="trimaran jobs",
                    fix="`trimaran jobs` lists the jobs that were launched from this account")  # fmt: skip


def _read(path: Path) -> JobRecord | None:
    try:
        record = json.loads(read_regular_bytes(path, limit_bytes=MAX_RECORD_BYTES))
        job = JobRecord(**{each.name: record[each.name] for each in fields(JobRecord)})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return job if JOB_ID.fullmatch(job.id) else None
