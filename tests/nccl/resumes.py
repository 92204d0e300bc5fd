"""Resumes over NCCL from every copy of the state: in memory, of a peer, on disk, and an older one after damage."""

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any

from tests.chaos.fault_run import kill_supervisor, resumes
from tests.chaos.nodes import Machine, make_run
from tests.fault.harness import Supervised, lines, wait_for
from tests.nccl.nccl_run import (
    PLANS,
    RUN_SECONDS,
    SETTINGS,
    assert_equals_calm_run,
    cluster_setting,
    environment,
    finish,
    start_supervised,
    train_calm_run,
)
from trimaran.checkpoint import complete_steps
from trimaran.core import EXIT_DONE
from trimaran.runs import RunDirectory

STEPS = ("train.steps=80", "checkpoint.every=10", "checkpoint.keep=4")
ADDRESSES = ("127.0.0.1", "127.0.0.2")


@dataclass(frozen=True, slots=True)
class ResumeRow:
    name: str
    plan: str = "dp_shard 2"
    ranks: int = 2


def resume_rows() -> list[ResumeRow]:
    return [ResumeRow(name) for name in RESUMES]


def run_resume_row(row: ResumeRow, folder: Path, backend: str) -> dict[str, Any]:
    """Return the result of one row."""
    began, path = time.monotonic(), folder / "runs" / f"resume-{row.name.replace(' ', '-')}"
    calm_path = folder / "runs" / "resume-calm"
    result = {"section": "resume", "name": row.name, "plan": row.plan, "ranks": row.ranks, "passed": False}
    try:
        if not (RunDirectory(calm_path).model / "model.safetensors").exists():
            train_calm_run(calm_path, row.plan, row.ranks, backend, *STEPS)
        run, result["what"] = RESUMES[row.name](row, path, backend)
        assert_equals_calm_run(run, RunDirectory(calm_path))
        result["passed"] = True
    except Exception:
        result["error"] = traceback.format_exc()[-3000:]
    return result | {"seconds": time.monotonic() - began}


def resume_from_memory(row: ResumeRow, path: Path, backend: str) -> tuple[RunDirectory, str]:
    with start_supervised(path, row.plan, row.ranks, backend, *STEPS) as supervised:
        supervised.wait_for_step(25)
        supervised.send_signal(1, SIGKILL)
        incident = supervised.wait_for_fault(0)
        assert incident.cost["lost_steps"] <= 1
        finish(supervised)
    return supervised.run, check_tier(supervised.run, "memory")


def resume_from_disk(row: ResumeRow, path: Path, backend: str) -> tuple[RunDirectory, str]:
    run = _lose_supervisor(row, path, backend)
    newest = max(complete_steps(run.checkpoints))
    with Supervised.again(run, extra=environment(backend)) as supervised:
        finish(supervised)
    assert resumes(run)[-1]["from_step"] == newest
    return run, check_tier(run, "disk")


def resume_from_an_older_checkpoint(row: ResumeRow, path: Path, backend: str) -> tuple[RunDirectory, str]:
    run = _lose_supervisor(row, path, backend)
    older, newest = sorted(complete_steps(run.checkpoints))[-2:]
    shard = run.checkpoints / f"step-{newest:08d}" / "rank-00001.safetensors"
    shard = shard if shard.exists() else next(run.checkpoints.glob(f"step-*{newest}/rank-00001.safetensors"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0xFF
    shard.unlink()
    shard.write_bytes(data)
    with Supervised.again(run, extra=environment(backend)) as supervised:
        finish(supervised)
    assert resumes(run)[-1]["from_step"] == older
    assert list(run.checkpoints.glob("refused-*"))
    return run, f"{check_tier(run, 'disk')}, as that of step {newest} was damaged"


def resume_from_peers(row: ResumeRow, path: Path, backend: str) -> tuple[RunDirectory, str]:
    """One of two nodes is lost with its memory and comes back; its rank's state is in the other node's memory."""
    run = make_run(path, cluster_setting(row.ranks, backend, nodes=2), *PLANS[row.plan], *SETTINGS, *STEPS)
    ours = environment(backend)
    nodes = [Machine(run, address, ["--nodes", "2", "--no-check"], environment=ours) for address in ADDRESSES]
    try:
        _wait_for_step(run, 25)
        nodes[1].lose()
        time.sleep(1)
        nodes[1].come_back()
        wait_for(lambda: len(lines(run.events(0))) and resumes(run), RUN_SECONDS)
        (run.path / "no-pause").touch()
        codes = [each.wait(RUN_SECONDS) for each in nodes]
        assert codes == [EXIT_DONE] * 2, f"exit codes {codes}"
    finally:
        for each in nodes:
            each.lose()
    return run, check_tier(run, "memory")


RESUMES: dict[str, Callable[[ResumeRow, Path, str], tuple[RunDirectory, str]]] = {
    "memory copies": resume_from_memory,
    "peer copies": resume_from_peers,
    "checkpoint on disk": resume_from_disk,
    "older checkpoint after damage": resume_from_an_older_checkpoint,
}


def check_tier(run: RunDirectory, tier: str) -> str:
    """Return where the last start resumed from; fail if it is not `tier`."""
    last = resumes(run)[-1]
    assert last["tier"] == tier, last
    return f"from {tier}, step {last['from_step']}"


def _lose_supervisor(row: ResumeRow, path: Path, backend: str) -> RunDirectory:
    """Return a run whose supervisor was killed, and with it the copies in memory."""
    with start_supervised(path, row.plan, row.ranks, backend, *STEPS) as supervised:
        supervised.wait_for_step(35)
        kill_supervisor(supervised)
    return supervised.run


def _wait_for_step(run: RunDirectory, step: int) -> None:
    wait_for(lambda: (found := lines(run.metrics)) and found[-1]["step"] >= step, 90)
