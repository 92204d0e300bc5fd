"""`python -m tests.chaos.soak`: one run, broken again and again by the faults that clusters have; see `mix`.

Prints a table and ends with 1 when less than 90 % of the time went into steps that survived, or when a fault was not
recognised for what it was.
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

from tests.chaos.mix import Kind, deal, wait_until
from tests.chaos.report import Blow, Soak, table
from tests.fault.harness import Supervised, lines, wait_for
from trimaran.core import Incident

PAUSE = 0.05
WARM_STEPS = 40  # before the first fault: a checkpoint is there, and it is known how long steps take
PATIENCE_SECONDS = 60.0
EXTRA = {"TRIMARAN_TEST_PLUGIN": "tests.chaos.plugin"}
SETTINGS = ("train.steps=10000000", "checkpoint.memory=1")


class Ordeal:
    """One run and everything that is done to it."""

    def __init__(self, path: Path, *, ranks: int, every: float, seed: int) -> None:
        self.ranks, self.every, self.chance = ranks, every, random.Random(seed)
        self.launched = time.time()
        # How often devices fail is all that is told: how often to save follows from it.
        told = (f"train.global_batch={4 * ranks}", f"checkpoint.device_hours={every * ranks / 3600}")
        self.sailing = Supervised.start(path, *SETTINGS, *told, ranks=ranks, pause=PAUSE, extra=EXTRA)
        self.blows: list[Blow] = []
        self._known: set[str] = set()

    def suffer(self, *, minutes: float) -> Iterator[Blow]:
        """Strike at random intervals, and yield what came of each."""
        self.sailing.wait_for_step(WARM_STEPS)
        until = time.monotonic() + minutes * 60 - (time.time() - self.launched)
        due = time.monotonic()
        for kind in deal(self.chance):
            due += self.chance.expovariate(1 / self.every)
            if max(due, time.monotonic()) > until - PATIENCE_SECONDS / 4:
                break
            wait_until(due)
            self.blows.append(self._strike(kind))
            yield self.blows[-1]
        wait_until(until)

    def _strike(self, kind: Kind) -> Blow:
        """Strike once and wait until the run is as it was."""
        sailing, rank = self.sailing, self.chance.randrange(self.ranks)
        began = time.time()
        kind.strike(sailing, rank)
        if kind.restarts:
            sailing.process.wait(PATIENCE_SECONDS)
        before = sailing.step()
        if kind.restarts:
            self.sailing = Supervised.again(sailing.run, pause=PAUSE, extra=EXTRA)
        try:
            incident = wait_for(lambda: self._settled(kind), PATIENCE_SECONDS)
        except AssertionError:
            incident = None
            assert self.sailing.process.poll() is None, "the supervisor has ended"
        detect = incident.cost.get("seconds_to_detect", incident.time - began) if incident else None
        recover = incident.cost.get("seconds_to_recover") if incident else None
        lost = incident.cost.get("lost_steps") if incident else None
        if kind.restarts:
            recover = wait_for(lambda: self._time_after(before + 1, began), PATIENCE_SECONDS) - began
            ready = self.sailing.events(0, "ready")[-1]["step"]
            lost = max(0, before - ready)
            detect = detect if kind.cause == "preempted" else None  # the host's end takes whoever could notice with it
        elif recover is None:
            self.sailing.wait_for_step(before + 3)
        return Blow(kind=kind.name, rank=rank, incident=incident, detect=detect, recover=recover,
                    lost_steps=None if lost is None else int(lost))  # fmt: skip

    def _settled(self, kind: Kind) -> Incident | None:
        """Return the new incident that is what `kind` should be called, once it is clear what became of it."""
        for each in self.sailing.incidents:
            if each.id in self._known or each.cause != kind.cause or each.action is None:
                continue
            if each.action == "restarted" and "seconds_to_recover" not in each.cost:
                continue
            self._known.add(each.id)
            return each
        return None

    def _time_after(self, step: int, began: float) -> float | None:
        found = (each["time"] for each in lines(self.sailing.run.metrics) if each["step"] > step)
        return next((moment for moment in found if moment > began), None)

    def finish(self) -> Soak:
        """End the run and count what it has come to."""
        wall = time.time() - self.launched
        self.sailing.process.send_signal(signal.SIGTERM)
        self.sailing.process.wait(PATIENCE_SECONDS)
        metrics = lines(self.sailing.run.metrics)
        good = sum(each["step_seconds"] - each["phases"]["checkpoint"] for each in metrics if not each.get("skipped"))
        struck = {blow.incident.id: blow for blow in self.blows if blow.incident is not None}
        others = [each for each in self.sailing.incidents if each.id not in struck]
        named = [each for each in self.sailing.incidents if each.id in struck and each.suspects]
        false = [each for each in named if each.suspects != (struck[each.id].rank,)]
        return Soak(
            wall_seconds=wall,
            good_seconds=good,
            steps=len(metrics),
            blows=self.blows,
            false_blames=[*false, *(each for each in others if each.suspects and each.cause != "straggler")],
            unexpected=[each for each in others if each.cause == "straggler" or _is_strange(each)],
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=60.0, help="mean seconds between two faults")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the table there, too")
    parser.add_argument("--keep", type=Path, help="where the run directory stays; gone afterwards without it")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ordeal = Ordeal((flags.keep or Path(folder)) / "soak", ranks=flags.ranks, every=flags.every, seed=flags.seed)
        try:
            for blow in ordeal.suffer(minutes=flags.minutes):
                print(_line(blow, ordeal.launched), flush=True)
            soak = ordeal.finish()
        finally:
            ordeal.sailing.__exit__()
    machine = f"{time.strftime('%Y-%m-%d')}, {flags.ranks} gloo ranks on {os.cpu_count()} cores, {platform.machine()}"
    report = table(soak, about=machine)
    print(report)
    if flags.out:
        flags.out.write_text(report + "\n")
    return 0 if soak.passed else 1


def _is_strange(incident: Incident) -> bool:
    return not incident.suspects and incident.cause not in ("preempted", "host")  # the end, and hosts that we took


def _line(blow: Blow, launched: float) -> str:
    told = f"{blow.incident.id} {blow.incident.cause} {blow.incident.suspects}" if blow.incident else "NOT RECOGNISED"
    detect, recover = (f"{each:.2f} s" if each is not None else "-" for each in (blow.detect, blow.recover))
    return (f"{time.time() - launched:6.0f} s  {blow.kind:32} rank {blow.rank}: {told}; detected {detect}, "
            f"recovered {recover}, lost {blow.lost_steps}")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
