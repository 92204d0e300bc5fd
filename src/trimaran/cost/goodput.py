"""What of a run's time moves it on: failures, restarts, checkpoints and data that comes late take the rest."""

import math
from dataclasses import dataclass

from trimaran.core import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often one device fails a run, and how long the run is down until its next step. Infinity: never."""

    device_hours: float
    restart: Seconds

    def seconds_between(self, num_devices: int) -> Seconds:
        """Return the mean time between failures of a run: the more devices, the shorter."""
        return Seconds(self.device_hours * 3600 / num_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The share of the time that moves a run on, and the seconds between checkpoints that make it most.

    `lost` is what takes the rest: with `share` it adds up to 1.
    """

    share: float
    interval: Seconds
    lost: dict[str, float]


def best_interval(write: Seconds, between: Seconds, *, restart: Seconds) -> Seconds:
    """Return how long to train between two checkpoints: Daly's second-order optimum, Young's where writes are short.

    J. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, equation 37. A write
    that takes two times as long as a run lasts leaves no better choice than the mean time between failures itself.
    `restart` moves no optimum, but a run that fails while it restarts is none: it must be shorter than `between`.
    """
    if math.isinf(between) or write == 0:
        return Seconds(math.inf if math.isinf(between) else 0.0)
    if write >= 2 * between or restart >= between:
        return between
    ratio = write / (2 * between)
    return Seconds(math.sqrt(2 * write * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - write)


def write_seconds(state_bytes: float, *, disk_bandwidth: float, stalls: float = 1.0) -> Seconds:
    """Return how long a checkpoint of the whole run's `state_bytes` holds it up.

    `disk_bandwidth` is of all nodes together. `stalls` is the share of a write that the run waits for: 1 where it waits
    for the disk, near 0 where it copies the states and goes on.
    """
    return Seconds(stalls * state_bytes / disk_bandwidth)


def checkpoint_bytes(num_parameters: int, *, weight_bytes: float = 4.0, moment_bytes: float = 8.0) -> Bytes:
    """Return what a run must write to go on from: weights (masters where there are any) and moments."""
    return Bytes(int(num_parameters * (weight_bytes + moment_bytes)))


def expected_goodput(
    faults: Faults, num_devices: int, *, write: Seconds, step: Seconds, data: Seconds | None = None
) -> Goodput:
    """Return what of the time steps take when checkpoints of `write` seconds are as often as is best.

    A failure costs the restart and, on average, half of what was done since the last checkpoint. `data` is how long a
    step's data takes to come; what of it a step does not hide is lost.
    """
    between = faults.seconds_between(num_devices)
    interval = best_interval(write, between, restart=faults.restart)
    cycle = interval + write
    late = max(0.0, (data or 0.0) - step)
    failing = 0.0 if math.isinf(between) else min(1.0, (faults.restart + cycle / 2) / between)
    writing = 0.0 if math.isinf(interval) or not cycle else write / cycle
    waiting = late / (step + late)
    running = 1 - failing
    share = running * (1 - writing) * (1 - waiting)
    lost = {"failures": failing, "checkpoints": running * writing, "data": running * (1 - writing) * waiting}
    return Goodput(share=share, interval=interval, lost=lost)
