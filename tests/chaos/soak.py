"""`python -m tests.chaos.soak`: one run with repeated faults, in the mix of a large cluster; see `mix`.

Prints a table and exits with 1 if less than 90 % of the time went into steps that survived, or if a fault got the wrong
cause, or the wrong rank.
"""

import argparse
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.mix import Kind, draw_kinds, wait_until
from tests.chaos.report import InjectedFault, Soak, good_seconds, table, with_table
from tests.fault.harness import Supervised, lines, wait_for
from trimaran.core import Incident
from trimaran.runs import read_ledger

PAUSE = 0.05
WARM_UP_STEPS = 40  # before the first fault, so that there is a checkpoint and a known step time
TIMEOUT_SECONDS = 60.0
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "fault-tolerance.md"
EXTRA = {"TRIMARAN_TEST_PLUGIN": "tests.chaos.plugin"}
SETTINGS = ("train.steps=10000000", "checkpoint.memory=1")


class SoakRun:
    """One run and the faults that are injected into it."""

    def __init__(self, path: Path, *, ranks: int, every: float, seed: int) -> None:
        self.ranks, self.every, self.random = ranks, every, random.Random(seed)
        self.launched = time.time()
        # Set only the failure rate of devices; the checkpoint interval follows from it.
        rates = (f"train.global_batch={4 * ranks}", f"checkpoint.device_hours={every * ranks / 3600}")
        self.supervised = Supervised.start(path, *SETTINGS, *rates, ranks=ranks, pause=PAUSE, extra=EXTRA)
        self.faults: list[InjectedFault] = []
        self._known: set[str] = set()

    def inject_faults(self, *, minutes: float) -> Iterator[InjectedFault]:
        """Inject faults at random intervals, and yield the result of each."""
        self.supervised.wait_for_step(WARM_UP_STEPS)
        until = time.monotonic() + minutes * 60 - (time.time() - self.launched)
        due = time.monotonic()
        for kind in draw_kinds(self.random):
            due += self.random.expovariate(1 / self.every)
            if max(due, time.monotonic()) > until - TIMEOUT_SECONDS / 4:
                break
            wait_until(due)
            self.faults.append(self._inject(kind))
            yield self.faults[-1]
        wait_until(until)

    def _inject(self, kind: Kind) -> InjectedFault:
        """Inject one fault and wait until the run has recovered."""
        supervised, rank = self.supervised, self.random.randrange(self.ranks)
        began = time.time()
        with kind.inject(supervised, rank):
            if kind.restarts:
                supervised.process.wait(TIMEOUT_SECONDS)
            before = supervised.step()
            if kind.restarts:
                self.supervised = Supervised.again(supervised.run, pause=PAUSE, extra=EXTRA)
            try:
                incident = wait_for(lambda: self._settled(kind), TIMEOUT_SECONDS)
            except AssertionError:
                incident = None
                assert self.supervised.process.poll() is None, "the supervisor has ended"
        detect = incident.cost.get("seconds_to_detect", incident.time - began) if incident else None
        recover = incident.cost.get("seconds_to_recover") if incident else None
        lost = incident.cost.get("lost_steps") if incident else None
        if kind.restarts:
            recover = wait_for(lambda: self._time_after(before + 1, began), TIMEOUT_SECONDS) - began
            ready = self.supervised.events(0, "ready")[-1]["step"]
            lost = max(0, before - ready)
            detect = detect if kind.cause == "preempted" else None  # no process that could detect it survives
        elif recover is None:
            self.supervised.wait_for_step(before + 3)
        return InjectedFault(
            kind=kind.name,
            rank=rank,
            names_rank=kind.names_rank,
            incident=incident,
            detect=detect,
            recover=recover,
            lost_steps=None if lost is None else int(lost),
        )

    def _settled(self, kind: Kind) -> Incident | None:
        """Return the new incident with the cause of `kind`, once its outcome is known."""
        for each in self.supervised.incidents:
            if each.id in self._known or each.cause != kind.cause or each.action is None:
                continue
            if each.action == "restarted" and "seconds_to_recover" not in each.cost:
                continue
            self._known.add(each.id)
            return each
        return None

    def _time_after(self, step: int, began: float) -> float | None:
        found = (each["time"] for each in lines(self.supervised.run.metrics) if each["step"] > step)
        return next((moment for moment in found if moment > began), None)

    def finish(self) -> Soak:
        """Stop the run and return the result."""
        wall = time.time() - self.launched
        self.supervised.process.send_signal(signal.SIGTERM)
        self.supervised.process.wait(TIMEOUT_SECONDS)
        metrics = lines(self.supervised.run.metrics)
        expected = {fault.incident.id: fault for fault in self.faults if fault.incident is not None}
        others = [each for each in self.supervised.incidents if each.id not in expected]
        named = [each for each in self.supervised.incidents if each.id in expected and each.suspects]
        false = [each for each in named if each.suspects != (expected[each.id].rank,)]
        return Soak(
            wall_seconds=wall,
            good_seconds=good_seconds(metrics),
            steps=len(metrics),
            faults=self.faults,
            false_attributions=[*false, *(each for each in others if each.suspects and each.cause != "straggler")],
            unexpected=[each for each in others if each.cause == "straggler" or _is_unexpected(each)],
            ledger=read_ledger(self.supervised.run).seconds,
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=60.0, help="mean seconds between two faults")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    parser.add_argument("--guide", action="store_true", help="also write the table into docs/guides/fault-tolerance.md")
    parser.add_argument("--keep", type=Path, help="keep the run directory here; by default it is deleted")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak_run = SoakRun((flags.keep or Path(folder)) / "soak", ranks=flags.ranks, every=flags.every, seed=flags.seed)
        try:
            for fault in soak_run.inject_faults(minutes=flags.minutes):
                print(_line(fault, soak_run.launched), flush=True)
            soak = soak_run.finish()
        finally:
            soak_run.supervised.__exit__()
    machine = f"{time.strftime('%Y-%m-%d')}, {flags.ranks} gloo ranks on {os.cpu_count()} cores, {platform.machine()}"
    report = table(soak, about=machine)
    print(report)
    if flags.out:
        flags.out.write_text(report + "\n")
    if flags.guide:
        GUIDE.write_text(with_table(GUIDE.read_text(), table(soak, about=machine, peers=False)))
    return 0 if soak.passed else 1


def _is_unexpected(incident: Incident) -> bool:
    return not incident.suspects and incident.cause not in (
        "preempted",
        "host",
    )  # the stop, and hosts that the soak killed


def _line(fault: InjectedFault, launched: float) -> str:
    result = (
        f"{fault.incident.id} {fault.incident.cause} {fault.incident.suspects}" if fault.incident else "NOT RECOGNISED"
    )
    detect, recover = (f"{each:.2f} s" if each is not None else "-" for each in (fault.detect, fault.recover))
    return (f"{time.time() - launched:6.0f} s  {fault.kind:32} rank {fault.rank}: {result}; detected {detect}, "
            f"recovered {recover}, lost {fault.lost_steps}")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
