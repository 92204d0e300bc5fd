"""Goodput, duration and price of a run: how failures, restarts, checkpoints and late data lengthen it."""

import math
from dataclasses import dataclass

from trimaran.core import Bytes, Seconds

DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Mean hours between failures of one device (infinity: never), and the downtime until the next step."""

    device_hours: float
    restart: Seconds

    def seconds_between(self, num_devices: int) -> Seconds:
        """Return the mean time between failures of a run on `num_devices`."""
        return Seconds(self.device_hours * 3600 / num_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The goodput with the checkpoint interval that maximises it."""

    fraction: float  # of wall-clock time, spent on new steps
    interval: Seconds  # between checkpoints
    lost: dict[str, float]  # to failures, checkpoints and late data; with `fraction` they add up to 1


def best_interval(write: Seconds, between: Seconds, *, restart: Seconds) -> Seconds:
    """Return how long to train between two checkpoints: Daly's second-order optimum; Young's for short writes.

    J. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, equation 37.
    If a write takes twice the mean time between failures (`between`), the interval is `between` itself.
    `restart` does not move the optimum, but it must be shorter than `between`.
    """
    if math.isinf(between) or write == 0:
        return Seconds(math.inf if math.isinf(between) else 0.0)
    if write >= 2 * between or restart >= between:
        return between
    ratio = write / (2 * between)
    return Seconds(math.sqrt(2 * write * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - write)


def write_seconds(state_bytes: float, *, disk_bandwidth: float, stalls: float = 1.0) -> Seconds:
    """Return how long one checkpoint of `state_bytes` stalls the run.

    `disk_bandwidth` is of all nodes together. `stalls` is the fraction of a write that the run waits for: 1 for a
    synchronous write, near 0 if the run copies its state and continues.
    """
    return Seconds(stalls * state_bytes / disk_bandwidth)


def checkpoint_bytes(num_parameters: int, *, weight_bytes: float = 4.0, moment_bytes: float = 8.0) -> Bytes:
    """Return the bytes of a checkpoint: weights (master weights where there are any) and moments."""
    return Bytes(int(num_parameters * (weight_bytes + moment_bytes)))


def expected_goodput(
    faults: Faults, num_devices: int, *, write: Seconds, step: Seconds, data: Seconds | None = None
) -> Goodput:
    """Return the goodput with checkpoints of `write` seconds at the best interval.

    A failure costs the restart and, on average, half of the work since the last checkpoint. `data` is how long the
    data of a step takes to load; the part that exceeds the step is lost.
    """
    between = faults.seconds_between(num_devices)
    interval = best_interval(write, between, restart=faults.restart)
    cycle = interval + write
    late = max(0.0, (data or 0.0) - step)
    failing = 0.0 if math.isinf(between) else min(1.0, (faults.restart + cycle / 2) / between)
    writing = 0.0 if math.isinf(interval) or not cycle else write / cycle
    waiting = late / (step + late)
    running = 1 - failing
    fraction = running * (1 - writing) * (1 - waiting)
    lost = {"failures": failing, "checkpoints": running * writing, "data": running * (1 - writing) * waiting}
    return Goodput(fraction=fraction, interval=interval, lost=lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """A run from start to end: its days, the hours of all its devices together, and its price in the currency given."""

    days: float
    device_hours: float
    cost: float


def bill_of(
    num_tokens: float, tokens_per_second: float, *, num_devices: int, hour_price: float, goodput: float = 1.0
) -> Bill:
    """Return what training on `num_tokens` costs on devices that are paid by the hour, used or not.

    `tokens_per_second` is of the whole cluster. `goodput` is the fraction of the time spent on new steps.
    """
    seconds = num_tokens / (tokens_per_second * goodput)
    hours = seconds / 3600 * num_devices
    return Bill(days=seconds / DAY_SECONDS, device_hours=hours, cost=hours * hour_price)
