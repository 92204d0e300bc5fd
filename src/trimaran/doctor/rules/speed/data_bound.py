"""F001: steps wait for their batches."""

import math
from collections.abc import Iterator
from statistics import fmean

from trimaran.core import Finding, show_seconds
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.step_breakdown import StepBreakdown, data_wait, measure, number, settled

SHARE = 0.1  # of the time: what waiting for data must take to be worth a word
OFTEN = 0.05  # of the steps must wait: one hiccup of a disk is no diagnosis
WORTH = 0.05  # of a step: one process in place of the thread loads no faster
MARGIN = 1.25  # loading power over what is needed on average, as the loader's own tuner has it
UNSEEN = 8  # loader processes of a rank at most, where nobody has looked how many cores there are
BUSY = 0.85  # of a core: a loader process that computes all the time


def data_bound(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when the trainer waits for its loader."""
    measured = measure(evidence)
    if measured is None or measured.share("data") < SHARE:
        return
    steps = settled(evidence)
    waiting = [each for each in steps if data_wait(each) > 0.02 * each["step_seconds"]]
    if len(waiting) < OFTEN * len(steps):
        return
    workers, busy = _workers(evidence, waiting), _busy(evidence)
    patch, gain = _patch(evidence, measured, workers)
    who = f"{workers} loader processes" if workers > 1 else "1 loader process" if workers else "the loader thread"
    facts = {"data_share": round(measured.share("data"), 4), "data_seconds": measured.data, "workers": workers}
    yield Finding(
        code="F001",
        severity="warning",
        verdict=f"the trainer waits {measured.share('data'):.0%} of its time for data: {show_seconds(measured.data)} "
        f"of a step of {show_seconds(measured.step)}",
        culprit=who,
        evidence=facts | ({"loader_busy": round(busy, 3)} if busy is not None else {}) | {"steps": measured.steps},
        patch=patch,
        fix=""
        if patch
        else "no core is left for more loader processes: prepare the data once (tokenised shards, "
        "smaller images), put it on a faster disk, or give the node more cores",
        expected_effect=f"steps {gain:.0%} shorter" if patch else "",
        gain=gain if patch else None,
        confidence=0.95 if busy is None or busy > BUSY else 0.8,
    )


def _patch(evidence: Evidence, measured: StepBreakdown, workers: int) -> tuple[dict[str, object], float]:
    """Return the setting that loads as fast as the trainer computes, or as nearly as the cores allow, and its gain.

    Who waits is fed at the loader's pace: its processes together took as many steps' time as there are of them.
    """
    busy = measured.step - measured.data
    load_seconds = max(1, workers) * measured.step
    wanted = math.ceil(MARGIN * load_seconds / busy)
    room = _room(evidence)
    given = max(1, min(wanted, UNSEEN if room is None else room))
    gain = 1 - max(busy, load_seconds / given) / measured.step
    return ({"data.workers": given}, gain) if gain >= WORTH else ({}, 0.0)


def _workers(evidence: Evidence, waiting: list[Line]) -> int:
    """Return how many processes loaded at the end, for each rank."""
    told = [number(each, "loader", "workers") for each in waiting]
    if known := [each for each in told if each is not None]:
        return int(known[-1])
    return evidence.recipe.data.workers if isinstance(evidence.recipe.data.workers, int) else 0


def _room(evidence: Evidence) -> int | None:
    """Return how many loader processes a rank's share of its node's cores has room for, beside the rank itself."""
    rooms = [
        int(cores) // len(ranks) - 1
        for each in evidence.samples
        if (cores := number(each, "cores")) and isinstance(ranks := each.get("ranks"), dict) and ranks
    ]
    return min(rooms) if rooms else None


def _busy(evidence: Evidence) -> float | None:
    """Return how busy each loader process was, of a core; None where nobody looked."""
    told = [
        used
        for each in evidence.samples
        for rank in (each.get("ranks") or {}).values()
        if (used := number(rank, "loader_cpu")) is not None
    ]
    workers = evidence.recipe.data.workers
    loaders = [number(each, "loader", "workers") for each in evidence.steps if "loader" in each]
    count = next((each for each in reversed(loaders) if each), workers if isinstance(workers, int) else None)
    return min(1.0, fmean(told) / count) if told and count else None
