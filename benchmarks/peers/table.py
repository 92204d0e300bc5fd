"""Tables of results: the median over all windows of all rounds, and the range of the rounds.

`ms` is the median of single steps and `mean ms` their mean, which includes rare slow steps.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.peers.contests import CONTESTS, Contest

HEAD = "| peer | tokens/s | rounds | ratio | GiB | reserved | first step s | loss | runs | ms | mean ms | CPU ms |\n"
HEAD += "|---" * 12 + "|"


def windows(line: dict[str, Any]) -> list[float]:
    """Return the tokens per second of each window of a run."""
    seconds, size = line["seconds"], line["window"]
    parts = [seconds[start : start + size] for start in range(0, len(seconds), size)]
    return [len(part) * line["tokens_per_step"] / sum(part) for part in parts]


def speed(lines: Sequence[dict[str, Any]]) -> float:
    """Return the tokens per second of one peer: the median over the windows of all its runs."""
    return statistics.median(each for line in lines for each in windows(line))


def tables(lines: Iterable[dict[str, Any]]) -> str:
    """Return a Markdown table for each contest that has results."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for line in lines:
        runs.setdefault(line["contest"], {}).setdefault(line["peer"], []).append(line)
    return "\n\n".join(_table(name, CONTESTS[name], runs) for name in CONTESTS if name in runs)


def _table(name: str, contest: Contest, runs: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    peers = runs[name]
    good = {peer: [line for line in lines if "failed" not in line] for peer, lines in peers.items()}
    some = next((lines[0] for lines in good.values() if lines), None)
    where = f", {some['device']}, torch {some['torch']}, {some['model']}" if some else ""
    rows = [f"**{name}**{where}{'; ' if contest.about else ''}{contest.about}\n", HEAD]
    reference = speed(good[contest.reference]) if good.get(contest.reference) else 0.0
    for peer, lines in peers.items():
        rows.append(_row(peer, good[peer], reference) if good[peer] else f"| {peer} | {lines[-1]['failed']} |")
    if best := _best_other(good):
        ratios = [f"{peer} {speed(lines) / best[1]:.3f}" for peer, lines in good.items() if lines and is_ours(peer)]
        rows.append(f"\nof the best other, {best[0]}: {', '.join(ratios)}")
    if contest.beside and (other := _beside(contest.beside, runs)):
        ratios = [f"{peer} {speed(lines) / other:.3f}" for peer, lines in good.items() if lines]
        rows.append(f"\nof {contest.beside[1]} in {contest.beside[0]}: {', '.join(ratios)}")
    rows.append("\n" + "; ".join(_versions(good)))
    return "\n".join(rows)


def is_ours(peer: str) -> bool:
    return peer.startswith("trimaran")


def _best_other(good: dict[str, list[dict[str, Any]]]) -> tuple[str, float] | None:
    """Return the fastest peer that is not Trimaran, if there are both."""
    speeds = {peer: speed(lines) for peer, lines in good.items() if lines and not is_ours(peer)}
    if not speeds or not any(lines and is_ours(peer) for peer, lines in good.items()):
        return None
    return max(speeds.items(), key=lambda each: each[1])


def _cpu_ms(lines: list[dict[str, Any]]) -> str:
    """Return the median over windows of the CPU time of a step, if it was measured."""
    windows_ms = [1000 * each / line["window"] for line in lines for each in line.get("cpu_seconds", ())]
    return f"{statistics.median(windows_ms):.1f}" if windows_ms else ""


def _beside(which: tuple[str, str], runs: dict[str, dict[str, list[dict[str, Any]]]]) -> float:
    lines = [line for line in runs.get(which[0], {}).get(which[1], []) if "failed" not in line]
    return speed(lines) if lines else 0.0


def _row(peer: str, lines: list[dict[str, Any]], reference: float) -> str:
    rounds = [speed([line]) for line in lines]
    ratio = f"{speed(lines) / reference:.3f}" if reference else ""
    peak, reserved = (max(line[key] for line in lines) / 2**30 for key in ("peak_bytes", "reserved_bytes"))
    starts = ", ".join(f"{line['start_seconds']:.0f}" for line in lines)
    losses = f"{lines[0]['first_loss']:.3f} -> {lines[0]['last_loss']:.3f}"
    steps = [1000 * each for line in lines for each in line["seconds"]]
    times = f"{statistics.median(steps):.2f} | {statistics.mean(steps):.2f} | {_cpu_ms(lines)}"
    return (
        f"| {peer} | {speed(lines):,.0f} | {min(rounds):,.0f} - {max(rounds):,.0f} | {ratio} | {peak:.1f} | "
        f"{reserved:.1f} | {starts} | {losses} | {len(lines)} | {times} |"
    )


def _versions(good: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the version and the note of each peer."""
    return [
        f"{peer}: {lines[-1]['version']}" + (f" ({lines[-1]['note']})" if lines[-1]["note"] else "")
        for peer, lines in good.items()
        if lines
    ]
