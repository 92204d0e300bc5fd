"""Measured collectives by size, group and backend: the value, its file, and the bandwidths of nccl-tests."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trimaran.core import UserError
from trimaran.core.regular_files import read_regular_bytes
from trimaran.core.traits import DEVICE_TRAITS
from trimaran.machine.link_fit import LinkFit, fit_link
from trimaran.machine.validation_error import first_error

MAX_FILE_BYTES = 1 << 24
VERSION = 1

# Bytes that cross the link of a rank, per byte of the message, as nccl-tests counts them (doc/PERFORMANCE.md there).
# The message is the whole buffer: what an all-gather returns, what a reduce-scatter or an all-to-all is given.
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
    "send_recv": lambda ranks: 1.0,
}
# Messages that follow each other on a ring: the latency of a collective has this many hops.
NUM_HOPS: dict[str, Callable[[int], int]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1),
    "all_gather": lambda ranks: ranks - 1,
    "reduce_scatter": lambda ranks: ranks - 1,
    "all_to_all": lambda ranks: ranks - 1,
    "broadcast": lambda ranks: 1,
    "send_recv": lambda ranks: 1,
}

Positive = Annotated[float, Field(gt=0, lt=1e12, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1 << 20)]
Text = Annotated[str, Field(max_length=4096)]
Shape = ConfigDict(frozen=True, extra="ignore")  # a file also has what follows from these fields


class CommPoint(BaseModel):
    """A message size and the seconds of the collective; of a CPU the fastest round, of a GPU the median."""

    model_config = Shape

    num_bytes: Annotated[int, Field(ge=1, le=1 << 45)]
    seconds: Positive
    median_seconds: Positive
    max_seconds: Positive
    rounds: Count


class CommCurve(BaseModel):
    """One collective in one kind of group: `groups` groups of `ranks` ranks each worked at the same time.

    `nodes` is how many nodes a group spans. `link` is what connects its ranks: its bandwidth in the catalogue or the
    cluster's files, and the bus bandwidth that the planner expects of this collective on it.
    """

    model_config = Shape

    group: Text
    collective: Text
    ranks: Count
    nodes: Count
    groups: Count
    points: Annotated[tuple[CommPoint, ...], Field(min_length=1, max_length=64)]
    link: Text = ""
    link_gb_per_second: Positive | None = None
    planned_gb_per_second: Positive | None = None

    @property
    def bus_factor(self) -> float:
        return BUS_FACTORS[self.collective](self.ranks)

    def algorithm_bandwidth(self, point: CommPoint) -> float:
        """Bytes of the message a second."""
        return point.num_bytes / point.seconds

    def bus_bandwidth(self, point: CommPoint) -> float:
        """Bytes a second on the link of a rank."""
        return self.bus_factor * self.algorithm_bandwidth(point)

    @property
    def best_bus_bandwidth(self) -> float:
        return max(map(self.bus_bandwidth, self.points))

    def fit(self) -> LinkFit | None:
        """Return latency and bus bandwidth of the collective."""
        return fit_link([(self.bus_factor * point.num_bytes, point.seconds) for point in self.points])

    @property
    def num_hops(self) -> int:
        return NUM_HOPS[self.collective](self.ranks)


class CommPair(BaseModel):
    """Two ranks that sent each other a message at the same time, and the seconds of the fastest round."""

    model_config = Shape

    ranks: tuple[int, int]
    nodes: Count
    num_bytes: Count
    seconds: Positive


class CommResult(BaseModel):
    """What `trimaran bench comm` measured. `environment` has the variables that NCCL and gloo read.

    `skipped` are sizes that would have taken too long. `wrong` counts values that a collective got wrong.
    """

    model_config = Shape

    version: int = VERSION
    date: Text = ""
    device: Text
    backend: Text
    dtype: Text
    world_size: Count
    num_nodes: Count
    hosts: Annotated[tuple[Text, ...], Field(max_length=1 << 20)] = ()
    torch: Text = ""
    nccl: Text = ""
    environment: Annotated[dict[str, Text], Field(max_length=512)] = {}
    curves: Annotated[tuple[CommCurve, ...], Field(min_length=1, max_length=1024)]
    pairs: tuple[CommPair, ...] = ()
    skipped: tuple[dict[str, Any], ...] = ()
    wrong: tuple[dict[str, Any], ...] = ()

    def find(self, group: str, collective: str) -> CommCurve | None:
        return next((each for each in self.curves if (each.group, each.collective) == (group, collective)), None)


def make_points(measured: Sequence[Mapping[str, Any]], *, kind: str) -> tuple[CommPoint, ...]:
    """Return the points of a curve from the seconds of each round."""
    points = []
    for each in measured:
        rounds = each["rounds"]
        middle = statistics.median(rounds)
        seconds = min(rounds) if DEVICE_TRAITS[kind].shares_cores else middle
        points.append(CommPoint(num_bytes=each["bytes"], seconds=seconds, median_seconds=middle,
                                max_seconds=max(rounds), rounds=len(rounds)))  # fmt: skip
    return tuple(points)


def read_comm_result(path: Path) -> CommResult:
    """Return the result in the file; raise UserError if it is missing or not one."""
    fix = "write one with `trimaran bench comm --out FILE`"
    try:
        raw = read_regular_bytes(path, follow_links=True, limit_bytes=MAX_FILE_BYTES + 1)
        tree = json.loads(raw) if len(raw) <= MAX_FILE_BYTES else None
    except OSError as error:
        raise UserError("C011", f"the result cannot be read: {error.strerror}", where=str(path), fix=fix) from None
    except (ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict) or "curves" not in tree:
        raise UserError("C011", "this is not a result of `trimaran bench comm`", where=str(path), fix=fix)
    try:
        result = CommResult.model_validate(tree)
    except ValidationError as error:
        raise first_error(error, CommResult, code="C011", where=str(path)) from None
    unknown = sorted({each.collective for each in result.curves} - BUS_FACTORS.keys())
    if unknown or any(each.ranks < 2 for each in result.curves):
        what = f"'{unknown[0]}' is not a collective" if unknown else "a group has one rank"
        raise UserError("C011", what, where=str(path), fix=fix)
    return result
