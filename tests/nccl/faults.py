"""The faults that differ with NCCL, each in a run under the real supervisor; one run per plan takes all of them."""

import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals
from typing import Any

from tests.chaos.fault_run import inject_fault
from tests.fault.harness import Supervised, wait_for
from tests.nccl.nccl_run import assert_equals_calm_run, finish, start_supervised, train_calm_run
from trimaran.core import Cause, Incident

STEPS_BETWEEN = 6
STEPS = "train.steps=70"
RANK = 1  # the rank at fault


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to a rank, and the cause that the supervisor must name; `suspects` besides RANK are allowed."""

    sent: Signals | None = None
    plugin: str = ""
    cause: Cause = "hang"
    allows_others: bool = False


FAULTS = {
    "killed rank": Fault(sent=SIGKILL, cause="crash"),
    # Of two ranks that call different operations, both are suspects.
    "mismatched shapes": Fault(plugin="device-shape", cause="mismatch", allows_others=True),
    "rank that leaves early": Fault(plugin="exit", cause="exit"),
    "stopped rank": Fault(sent=SIGSTOP),
    "rank missing in a collective": Fault(plugin="hang"),
}


@dataclass(frozen=True, slots=True)
class FaultRow:
    fault: str
    plan: str
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.fault}@{self.plan}"


def fault_rows() -> list[FaultRow]:
    return [FaultRow(fault, plan, ranks) for plan, ranks in (("dp_shard 2", 2), ("tp 2 x pp 2", 4)) for fault in FAULTS]


def run_fault_rows(rows: Sequence[FaultRow], folder: Path, backend: str, until: float) -> Iterator[dict[str, Any]]:
    """Yield the results of `rows`; those of one plan after its run has ended."""
    for plan, ranks in dict.fromkeys((row.plan, row.ranks) for row in rows):
        if time.monotonic() < until:
            yield from _run_plan([row for row in rows if row.plan == plan], ranks, folder, backend)


def _run_plan(rows: Sequence[FaultRow], ranks: int, folder: Path, backend: str) -> list[dict[str, Any]]:
    """Return the results of all `rows` of one plan."""
    began, plan = time.monotonic(), rows[0].plan
    results = [{"section": "faults", "name": row.name, "plan": plan, "ranks": ranks, "passed": False} for row in rows]
    path = folder / "runs" / f"faults-{plan.replace(' ', '')}"
    try:
        calm = train_calm_run(path.with_name(f"{path.name}-calm"), plan, ranks, backend, STEPS)
        with start_supervised(path, plan, ranks, backend, STEPS) as supervised:
            for known, (row, result) in enumerate(zip(rows, results, strict=True)):
                result |= _cause_fault(FAULTS[row.fault], supervised, known)
            finish(supervised)
        assert_equals_calm_run(supervised.run, calm)
    except Exception:
        error = traceback.format_exc()[-3000:] + _ends_of_logs(path, ranks)
        results = [result | {"passed": False, "error": error} for result in results]
    return [result | {"seconds": (time.monotonic() - began) / len(rows)} for result in results]


def _cause_fault(fault: Fault, supervised: Supervised, known: int) -> dict[str, Any]:
    """Cause a fault, wait until the run is past it, and return what was found."""
    supervised.wait_for_step(supervised.step() + STEPS_BETWEEN, 90)
    before = supervised.step()
    if fault.sent is not None:
        began = supervised.send_signal(RANK, fault.sent)
    else:
        inject_fault(supervised, RANK, fault.plugin)
        wait_for(lambda: not (supervised.run.path / f"fault-{RANK}").exists())
        began = time.time()
    incident = supervised.wait_for_fault(known, 90)
    return {
        "passed": _is_named(fault, incident) and incident.action == "restarted" and incident.cost["lost_steps"] <= 1,
        "detected": incident.time - began,
        "recovered": incident.cost["seconds_to_recover"],
        "lost": incident.cost["lost_steps"],
        "steps_after": incident.step - before,
        "cause": incident.cause,
        "suspects": list(incident.suspects),
        "what": incident.what,
    }


def _is_named(fault: Fault, incident: Incident) -> bool:
    named = RANK in incident.suspects if fault.allows_others else incident.suspects == (RANK,)
    return incident.cause == fault.cause and named


def _ends_of_logs(path: Path, ranks: int) -> str:
    logs = [path / "logs" / f"rank-{rank}.log" for rank in range(ranks)]
    return "".join(f"\n-- {each.name}\n{each.read_text(errors='replace')[-1500:]}" for each in logs if each.exists())
