"""The section `slurm` of the site file."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

# Slurm's own lists of names: `n[1-4,7]`, `a100&ib`, `user@host`. No blanks and nothing that a shell or sbatch expands.
WORD = re.compile(r"[A-Za-z0-9_.,:;@+=()&|*%/\[\]!^-]*")
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


def _is_word(text: str) -> str:
    if not WORD.fullmatch(text):
        raise ValueError("only letters, digits and _.,:;@+=()&|*%/[]!^- are allowed here")
    return text


def _is_time(text: str) -> str:
    if text and not TIME.fullmatch(text):
        raise ValueError(
            "write a time limit as Slurm does: MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS"
        )
    return text


def _is_option(text: str) -> str:
    if not text.startswith("--") or any(ord(character) < 32 for character in text):
        raise ValueError("write an option of sbatch as it is written there, on one line: --licenses=matlab:1")
    return text


def _is_line(text: str) -> str:
    if "\0" in text or "\n" in text or "\r" in text:
        raise ValueError("write one line of shell for each entry")
    return text


Word = Annotated[str, AfterValidator(_is_word)]
Option = Annotated[str, AfterValidator(_is_option)]
Line = Annotated[str, AfterValidator(_is_line)]


class SlurmQueue(BaseModel):
    """Where a job waits, and on whose account."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    partition: Annotated[Word, Field(description="partition; empty: the default one")] = ""
    account: Annotated[Word, Field(description="account to charge")] = ""
    qos: Annotated[Word, Field(description="quality of service")] = ""
    constraint: Annotated[Word, Field(description="features that the nodes must have, such as `h100&ib`")] = ""
    reservation: Annotated[Word, Field(description="reservation to run in")] = ""
    exclude: Annotated[Word, Field(description="nodes to avoid, besides those known to be bad: `n[3,7]`")] = ""
    time: Annotated[str, AfterValidator(_is_time), Field(description="time limit; empty: the partition's")] = ""
    mail: Annotated[Word, Field(description="address that Slurm writes to when the job ends or fails")] = ""
    options: Annotated[tuple[Option, ...], Field(description="other options of sbatch, such as `--licenses=x:1`")] = ()


class SlurmNodes(SlurmQueue):
    """What a job gets of each node, and what is prepared there."""

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


class SlurmSite(SlurmNodes):
    """The whole section: queue, nodes, and how a run starts and continues."""

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
