"""Compares results of `benchmarks/throughput.py` with stored ratios.

usage: python -m benchmarks.regression RESULTS.jsonl [MORE.jsonl ...] [--update] [--json] [--limit 0.03]
                                       [--stored benchmarks/ratios.json]

A ratio is Trimaran's speed over a peer's in the same contest, on the same machine: medians over all windows of all
rounds. Its spread is the range of the ratios of single windows. A ratio more than `--limit` below the stored one of the
same device is a regression: it is reported, and the exit code is 1. If the spread is wider than the limit, the report
says so: measure again before you act on it. Stored ratios that were not measured are listed and do not fail.
`--update` stores the measured ratios instead of comparing. Without anything to compare the exit code is 2.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.peers.contests import CONTESTS
from benchmarks.peers.table import is_ours, speed, windows

STORED = Path(__file__).with_name("ratios.json")
LIMIT = 0.03
OK, REGRESSED, NOTHING = 0, 1, 2
Lines = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Trimaran's speed over that of a peer. `lowest` and `highest` are of single windows, of which there are `num`."""

    contest: str
    trimaran: str
    peer: str
    device: str
    ratio: float
    lowest: float
    highest: float
    num: int
    torch: str
    versions: str
    date: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.contest, self.trimaran, self.peer, self.device

    @property
    def name(self) -> str:
        return f"{self.contest}: {self.trimaran} / {self.peer}"

    @property
    def spread(self) -> float:
        return (self.highest - self.lowest) / self.ratio


def ratios(lines: Iterable[dict[str, Any]]) -> list[Ratio]:
    """Return the ratios of Trimaran to every peer in every contest and on every device; failed runs do not count."""
    groups: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for line in lines:
        if "failed" not in line:
            peers = groups.setdefault((line["contest"], line["device"]), {})
            peers.setdefault(line["peer"], []).append(line)
    found = []
    for (contest, device), peers in groups.items():
        for ours in filter(is_ours, peers):
            for other in _compared(contest, ours, peers):
                found.append(_ratio(contest, device, (ours, peers[ours]), (other, peers[other])))
    return found


def _compared(contest: str, ours: str, peers: Iterable[str]) -> list[str]:
    """Return what a peer of ours is compared with: all others, and the contest's reference even if it is ours."""
    reference = CONTESTS[contest].reference if contest in CONTESTS else ""
    return [each for each in peers if each != ours and (not is_ours(each) or each == reference)]


def _ratio(contest: str, device: str, ours: tuple[str, Lines], other: tuple[str, Lines]) -> Ratio:
    mine, theirs = ([each for line in side[1] for each in windows(line)] for side in (ours, other))
    single = [one / two for one, two in zip(mine, theirs, strict=False)]
    ratio = speed(ours[1]) / speed(other[1])
    last = other[1][-1]
    return Ratio(
        contest=contest,
        trimaran=ours[0],
        peer=other[0],
        device=device,
        ratio=round(ratio, 4),
        lowest=round(min(*single, ratio), 4),
        highest=round(max(*single, ratio), 4),
        num=len(single),
        torch=last["torch"],
        versions=f"{ours[1][-1]['version']}, {last['version']}",
        date=datetime.fromtimestamp(last["time"], UTC).date().isoformat() if "time" in last else "",
    )


def read_stored(path: Path) -> dict[tuple[str, str, str, str], Ratio]:
    entries = [Ratio(**each) for each in json.loads(path.read_text())] if path.exists() else []
    return {each.key: each for each in entries}


def write_stored(path: Path, stored: Iterable[Ratio]) -> None:
    """Write one ratio a line, so that a change of one is a change of one line."""
    rows = ",\n".join(json.dumps(asdict(each)) for each in sorted(stored, key=lambda each: each.key))
    path.write_text(f"[\n{rows}\n]\n")


def compare(measured: Sequence[Ratio], stored: dict[tuple[str, str, str, str], Ratio], limit: float) -> dict[str, Any]:
    """Return the regressions, the pairs that hold, those without a stored ratio, and those that were not measured."""
    pairs = [(each, stored[each.key]) for each in measured if each.key in stored]
    seen = {each.key for each in measured}
    return {
        "regressed": [pair for pair in pairs if pair[0].ratio < pair[1].ratio * (1 - limit)],
        "held": [pair for pair in pairs if pair[0].ratio >= pair[1].ratio * (1 - limit)],
        "new": [each for each in measured if each.key not in stored],
        "not_measured": [each for key, each in stored.items() if key not in seen],
    }


def text_of(found: dict[str, Any], limit: float) -> str:
    """Return the report, regressions first."""
    rows = [f"REGRESSED {_pair(now, then, limit)}" for now, then in found["regressed"]]
    rows += [f"held      {_pair(now, then, limit)}" for now, then in found["held"]]
    rows += [
        f"new       {each.name} {each.ratio:.3f} ({_range(each)}): store it with --update" for each in found["new"]
    ]
    if left := sorted({each.contest for each in found["not_measured"]}):
        rows.append(f"stored, but not measured completely: {', '.join(left)}")
    return "\n".join(rows) or "nothing was measured"


def _pair(now: Ratio, then: Ratio, limit: float) -> str:
    text = f"{now.name} {now.ratio:.3f} ({_range(now)}), stored {then.ratio:.3f} ({then.date}): "
    text += f"{now.ratio / then.ratio - 1:+.1%}"
    if now.spread > limit:
        text += f"; the windows spread over {now.spread:.1%}, measure again"
    if (now.torch, now.versions) != (then.torch, then.versions):
        text += f"; stored with torch {then.torch}, {then.versions}"
    return text


def _range(each: Ratio) -> str:
    return f"{each.num} windows, {each.lowest:.3f} to {each.highest:.3f}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--stored", type=Path, default=STORED)
    parser.add_argument("--limit", type=float, default=LIMIT)
    parser.add_argument("--update", action="store_true", help="store the measured ratios")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(words)
    if missing := [str(each) for each in options.results if not each.is_file()]:
        parser.error(f"there is no {', '.join(missing)}: name files that benchmarks/throughput.py has written")
    lines = [json.loads(line) for file in options.results for line in file.read_text().splitlines()]
    measured, stored = ratios(lines), read_stored(options.stored)
    if options.update:
        write_stored(options.stored, (stored | {each.key: each for each in measured}).values())
        print(f"stored {len(measured)} ratios in {options.stored}")
        return OK if measured else NOTHING
    found = compare(measured, stored, options.limit)
    print(json.dumps(found, default=asdict) if options.json else text_of(found, options.limit))
    if found["regressed"]:
        return REGRESSED
    return OK if found["held"] else NOTHING


if __name__ == "__main__":
    sys.exit(main())
