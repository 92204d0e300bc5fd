"""What the profiles of a run say of its steps: how often the host waited for the device in the middle of them."""

import gzip
import json
import logging
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

MAX_BYTES = 128 << 20  # of one trace, unpacked: more is not read
NUMBER = "aten::_local_scalar_dense"  # a number is read out of a tensor
# What makes the host wait until the device has caught up.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", NUMBER)
LOOKED_AT = ("forward", "backward")  # an optimizer on a CPU reads its own counters, and the loop its marks


def read_traces(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what each trace of a rank says: `file`, `steps`, `waits` by call, `places` and `wait_seconds`, of all steps
    together. What is no trace of ours is passed over."""
    for path in sorted(folder.glob("step-*-rank-*.trace.json.gz")):
        try:
            about = path.stat()
            facts = _facts(path, about.st_mtime_ns, about.st_size)
        except (OSError, ValueError, EOFError, zlib.error, KeyError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read: %r", path, error)
            continue
        if facts:
            yield facts


@lru_cache(maxsize=64)
def _facts(path: Path, changed: int, size: int) -> dict[str, Any]:
    """Return what a trace says. A file that is still the same (`changed`, `size`) is read once."""
    with gzip.open(path) as file:
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        return {}
    tree = json.loads(raw)
    about = tree["trimaran"]
    first, last = about["steps"]
    spans = sorted((begin, end, phase) for _, phase, begin, end in about["phases"] if phase in LOOKED_AT)
    base = int(tree.get("baseTimeNanoseconds") or 0)
    waits: Counter[str] = Counter()
    places: Counter[str] = Counter()
    seconds, before, busy_until = 0.0, "", 0.0
    events = sorted((each for each in tree["traceEvents"] if each.get("ph") == "X"), key=lambda each: each["ts"])
    # On a GPU the call that waits is there itself, and a number of the host's costs nothing.
    calls = {each["name"] for each in events if each["name"] in WAITS}
    calls = calls - {NUMBER} or calls
    for event in events:
        if event["name"] in calls and (phase := _phase(spans, base + event["ts"] * 1e3)):
            waits[event["name"]] += 1
            places[f"{phase}, after {before}"] += 1
            seconds += event.get("dur", 0.0) / 1e6
        elif event.get("cat") == "cpu_op" and event["ts"] >= busy_until and event["name"] != "aten::item":
            before, busy_until = event["name"], event["ts"] + event.get("dur", 0.0)
    return {
        "file": path.name,
        "steps": last - first + 1,
        "waits": dict(waits),
        "places": dict(places.most_common(5)),
        "wait_seconds": seconds,
    }


def _phase(spans: list[tuple[int, int, str]], moment: float) -> str:
    """Return the phase that a moment lies in, in nanoseconds since the epoch; nothing where it is none of those."""
    place = bisect_right(spans, (moment, float("inf"), "")) - 1
    return spans[place][2] if place >= 0 and spans[place][1] >= moment else ""
