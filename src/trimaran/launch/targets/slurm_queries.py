"""What Slurm's own commands say: about jobs, partitions, accounts, and whether they work here."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from trimaran.core import UserError

ASK_SECONDS = 30.0
SUBMIT_SECONDS = 120.0
# A field begins with a capital after a blank; values such as Comment and Command may have blanks in them.
FIELD = re.compile(r"(?:^| )([A-Z][A-Za-z:/]*)=")
UNKNOWN_JOB = "Invalid job id"


def find_missing(*tools: str) -> list[str]:
    """Return the commands of Slurm that are not installed here."""
    return [tool for tool in tools if shutil.which(tool) is None]


def run_slurm(
    *command: str, folder: Path | None = None, seconds: float = ASK_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Return what one of Slurm's commands answers, whatever its exit code; raise UserError if it cannot be run."""
    try:
        return subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
        )
    except FileNotFoundError:
        raise UserError("L030", f"the command {command[0]} is not installed here", where="--on slurm",
                        fix="launch from a login node, or copy the launch files there") from None  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError("L031", f"{command[0]} has not answered for {seconds:g} s", where="--on slurm",
                        fix="check slurmctld with `scontrol ping`") from None  # fmt: skip


def ask_slurm(*command: str) -> str:
    """Return the output of one of Slurm's commands; raise UserError if it fails."""
    done = run_slurm(*command)
    if done.returncode != 0:
        raise UserError("L031", f"{command[0]}: {first_line(done.stderr) or done.returncode}", where="--on slurm",
                        fix="check slurmctld with `scontrol ping`, and SLURM_CONF")  # fmt: skip
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
            raise UserError("L031", f"scontrol: {first_line(done.stderr)}", where="--on slurm",
                            fix="check slurmctld with `scontrol ping`")  # fmt: skip
    return found


def show_partition(name: str) -> dict[str, str] | None:
    """Return the fields of a partition, or of the default one if `name` is empty; None if there is none."""
    done = run_slurm("scontrol", "show", "partition", "--oneliner", *([name] if name else []))
    found = [parse_fields(line) for line in done.stdout.splitlines() if line.startswith("PartitionName=")]
    if name:
        return found[0] if found and done.returncode == 0 else None
    return next((each for each in found if each.get("Default") == "YES"), None)


def list_partitions() -> list[str]:
    """Return the names of all partitions."""
    return sorted(set(ask_slurm("sinfo", "--noheader", "--format=%R").split()))


def gpus_per_node(partition: str) -> int:
    """Return the most GPUs that a node of a partition has."""
    listed = ask_slurm("sinfo", "--noheader", f"--partition={partition}", "--format=%G")
    found = [re.findall(r"(?:^|,)gpu(?::[^:(,]+)?:(\d+)", line) for line in listed.splitlines()]
    return max((sum(map(int, counts)) for counts in found), default=0)


def user_accounts(user: str) -> list[str] | None:
    """Return the accounts of a user; None if the cluster keeps no accounts, or does not tell."""
    if find_missing("sacctmgr"):
        return None
    done = run_slurm("sacctmgr", "--noheader", "--parsable2", "show", "associations", f"user={user}", "format=account")
    return sorted(set(done.stdout.split())) if done.returncode == 0 and done.stdout.strip() else None


def has_pyxis() -> bool:
    """Return whether the pyxis plugin has added its options to srun."""
    return "--container-image" in run_slurm("srun", "--help").stdout
