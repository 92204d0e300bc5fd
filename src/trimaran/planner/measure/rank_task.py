"""Runs a rehearsed rank in a process of its own, whose crash is an answer. Task and answer are JSON. No torch."""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import TypeAdapter

from trimaran.core import Plan, Recipe, UserError, dump_recipe, kill_tree, parse_recipe
from trimaran.runs import says_out_of_memory, worker_environment
from trimaran.runs.compile_cache import compile_cache

Status = Literal["measured", "out of memory", "refused", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """One rank of a plan to rehearse: how many steps after the warm-up, with data from which cache, on which device."""

    recipe: Recipe
    plan: Plan
    rank: int
    steps: int
    cache: Path
    on_cpu: bool

    def as_json(self) -> str:
        tree = {"recipe": dump_recipe(self.recipe), "plan": self.plan.model_dump(mode="json"), "rank": self.rank,
                "steps": self.steps, "cache": str(self.cache), "on_cpu": self.on_cpu}  # fmt: skip
        return json.dumps(tree)

    @classmethod
    def from_json(cls, text: str) -> Self:
        tree = json.loads(text)
        return cls(
            recipe=parse_recipe(tree["recipe"], name="the rehearsed recipe"),
            plan=Plan.model_validate(tree["plan"]),
            rank=tree["rank"],
            steps=tree["steps"],
            cache=Path(tree["cache"]),
            on_cpu=tree["on_cpu"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRank:
    """What a rank needed."""

    peak_bytes: int  # of its tensors, from the first one that was built
    steady_peak_bytes: int  # the same after the warm-up
    reserved_bytes: int  # by its allocator, at most; 0 on a CPU
    step_seconds: float  # the median step
    all_seconds: list[float]
    # Median `forward`, `backward`, `optimizer` and `other`: what the trainer counts as communication, of which only
    # local work is left, such as the norm of the gradients.
    phases: dict[str, float]
    stages: dict[int, dict[str, float]]  # mean seconds of a micro-batch's passes, by stage and kind, in a pipeline
    passes: list[tuple[str, int, int]]  # of the last step, in order: kind, stage, micro-batch
    losses: list[float]  # of all steps
    num_refused: int  # updates with a NaN or Inf, of all steps
    build_seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAnswer:
    """How a rehearsed rank ended: measured, or why not. `error` are the fields of a UserError if it was refused."""

    status: Status
    device: str = ""
    measured: MeasuredRank | None = None
    message: str = ""
    error: dict[str, str] | None = None

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RankAnswer":
        return TypeAdapter(cls).validate_python(json.loads(text))  # lists become tuples, and texts of keys numbers


MAX_LOG_BYTES = 1 << 16  # that are read of the end of a rank's output


def run_rank(task: RankTask, environment: Mapping[str, str], *, limit_seconds: float) -> RankAnswer:
    """Return how the rank ended. Raises the UserError with which the trainer would refuse it.

    `environment` is the caller's; the rank gets the variables of the plan's real ranks on top of it.
    """
    own = worker_environment(environment, task.plan, on_cpu=task.on_cpu, deterministic=task.recipe.train.deterministic)
    with tempfile.TemporaryDirectory(prefix="trimaran-rehearse-") as folder:
        files = [Path(folder) / name for name in ("task.json", "answer.json", "log.txt")]
        files[0].write_text(task.as_json(), encoding="utf-8")
        command = [sys.executable, "-m", "trimaran.train.rehearsal", str(files[0]), str(files[1])]
        with files[2].open("wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       env={**environment, **own, **compile_cache(environment)})  # fmt: skip
            try:
                code = process.wait(limit_seconds)
            except subprocess.TimeoutExpired:
                return RankAnswer(status="failed", message=f"it took more than {limit_seconds:,.0f} s")
            finally:
                kill_tree(process)
        if code == 0 and files[1].is_file():
            answer = RankAnswer.from_json(files[1].read_text(encoding="utf-8"))
            if answer.error is not None:
                first = answer.error
                raise UserError(first["code"], first["what"], where=first["where"], fix=first["fix"])
            return answer
        # It ended without an answer: by a signal, or with an error in its last line.
        text = files[2].read_bytes()[-MAX_LOG_BYTES:].decode(errors="replace")
        if code == -signal.SIGKILL:
            message = "the system killed it (SIGKILL), most likely because the host's memory was full"
            return RankAnswer(status="out of memory", message=message)
        lines = [line for line in text.splitlines() if line.strip()] or ["it wrote nothing"]
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        status = "out of memory" if says_out_of_memory(lines[-1]) else "failed"
        return RankAnswer(status=status, message=f"{name}: {lines[-1][:300]}")
