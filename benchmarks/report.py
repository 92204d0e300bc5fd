"""Writes docs/benchmarks.md and its figures from the dated results of this folder: `python -m benchmarks.report`.

`--check` writes nothing and fails if the page is older than the results. The page has no figure of its own: numbers are
read from ratios.json, h200_serving.jsonl, results.md, docs/accuracy.md and docs/guides/fault-tolerance.md, and those in
sentences must stand there word for word (`QUOTED`).
"""

import json
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
HERE, DOCS = ROOT / "benchmarks", ROOT / "docs"
Bar = tuple[str, float, bool]  # label, value, whether it is ours

PEERS = {
    "hf_trainer": "HF Trainer", "lightning": "Lightning", "loop+plain": "a plain compiled loop",
    "loop+eager": "a plain eager loop", "torchtitan+selective": "torchtitan, selective recompute",
    "trimaran": "Trimaran, full rows", "torchtitan": "torchtitan",
}  # fmt: skip
OURS = {
    "trimaran+run": "`trimaran train`", "trimaran+eager": "Trimaran, eager", "trimaran+packed": "Trimaran, packed",
    "trimaran": "Trimaran",
}  # fmt: skip
ACCURACY = (  # rows of the first table of docs/accuracy.md: source, figure
    ("our trainer, H200", "memory, worst, today's code"), ("our trainer, H200", "step time, worst, today's code"),
    ("our trainer, after the fit", "memory, worst, today's code"),
    ("our trainer, after the fit", "step time, worst, today's code"),
    ("our trainer, 25M to 360M", "memory, worst"), ("our trainer, 25M to 360M", "step time, worst"),
    ("nanotron", "memory, mean error"), ("nanotron", "tokens/s, mean error, clean"),
    ("torchtitan", "tokens/s, median error"), ("Korthikanti", "tokens/s, median error"),
    ("NVIDIA Nemotron-4", "tokens/s, median error"),
)  # fmt: skip

HEAD = """# Benchmarks

`python -m benchmarks.report` writes this page from the dated results in [benchmarks](../benchmarks/results.md), and
`make test` fails if it is older than they are.
Every figure is from one run of a script; a ratio compares with a peer in the same run.
No result was measured again for this page: each has its own date, hardware and version of torch.
"""
TRAINING = """
## Training speed beside peers

`python benchmarks/throughput.py` on one NVIDIA H200; the ratios of `benchmarks/ratios.json`, which
`python -m benchmarks.regression` compares later runs with. Further runs, with torchtitan 0.3.0 in fp8, long rows and
mixtures of many experts, are in the [results](../benchmarks/results.md#against-peers).
More than 1 means that Trimaran is faster.
*Lowest* and *highest* are over the alternating windows of the run; a run with one window has no spread.

![Speed of Trimaran over that of a peer](images/bench-training.svg)
"""
NOT_TRAINING = """
Not measured: several GPUs over NVLink or InfiniBand (no such machine was at hand), GPUs other than the H200,
Megatron-LM and DeepSpeed beside us, and HF Trainer and Lightning at small sizes other than 160M.
On a CPU `trimaran train` is slower than a plain loop: 0.970 of its speed with one rank in fp32
([results](../benchmarks/results.md#small-models)).
"""
PREDICTION = """
## Accuracy of predicted memory and time

`make accuracy`: errors relative to the measurement, with the code of this version.
Rows of our trainer are runs on one H200; the others are published runs of other programs.
[How accurate the planner is](accuracy.md) has every set, the ones that are predicted badly too.

![Errors of predicted memory and speed](images/bench-accuracy.svg)
"""
NOT_PREDICTION = """
Not measured: our own trainer on several GPUs. Ranks of such plans were rehearsed one by one on one H200
([rehearsing](guides/rehearse.md)), and their communication is computed.
"""
SERVING = """
## Serving

`python benchmarks/serving.py` on one NVIDIA H200, bf16 unless the row says fp8, random weights, 64 requests at once or
a Poisson stream; the newest round of each row of `benchmarks/h200_serving.jsonl`.
The engine runs in the benchmark's process, without HTTP, except where a row says so.

![Generated tokens a second](images/bench-serving.svg)
"""
NOT_SERVING = """
`again`: a second batch with the same lengths, so that no shape is new. HTTP rows are of `benchmarks/serving_http.py`.
Not measured: vLLM and SGLang, and trained weights.
What limits these figures is in [speed of serving](guides/serve-speed.md#measured).
"""
START = """
## Time to the first step

`python -m benchmarks.start_targets --rounds 1`, 2026-11-17, 2 Neoverse cores, torch 2.13: one start each.
Two nodes with one rank each, all on that machine. Seconds from the command to the end of the first step.

![Seconds to the first step](images/bench-start.svg)
"""
NOT_START = """
`python -m benchmarks.start`, one H200, 160M: 8.6 s with a filled compile cache (2026-11-17), 19.7 s with an empty one.
A plain script takes 15.7 s there ([results](../benchmarks/results.md#against-peers)).
Not measured: starts on more than one real machine.
"""
FAULTS = """
## Recovery from faults

Seconds until a fault is detected and until the first new step after it, from
[faults](guides/fault-tolerance.md#all-tested-faults).
`make chaos` and `make soak`, 2026-11-15, CPU ranks over gloo on the CPUs of an H200 machine.
The peers ran on 2 CPU cores with a job of the same step time, so compare orders of magnitude only.

![Seconds to the first new step](images/bench-faults.svg)
"""
NOT_FAULTS = """
On one H200, busy with other tests, a killed rank reached a new step after 4.9 s and a stopped one after 12.9 s.
Not measured: faults of real networks and GPUs (Xid and ECC errors, NVLink, InfiniBand).

## How a node's loss scales

`python -m benchmarks.control_plane`, 2026-11-16, 2 Neoverse cores: light clients speak the real protocol, each a node
with 8 ranks.
"""

QUOTED = {  # what the sentences above repeat, as it stands in its source
    "results": ("**0.970** after projections", "the first step is done 19.7 s after the command", "it is 8.6 s:",
                "The plain script takes 15.7 s on that machine"),
    "faults": ("a killed rank reached a new step after 4.9 s", "A stopped rank took 12.9 s"),
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Write the page, or with `--check` return 1 if a file of it is not what the results give."""
    files = page()
    old = stale(files)
    if "--check" in arguments:
        for path in old:
            print(f"{path.relative_to(ROOT)} is older than the results: run python -m benchmarks.report")
        return int(bool(old))
    for path in old:
        path.write_text(files[path], encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


def stale(files: Mapping[Path, str]) -> list[Path]:
    """Return the files that are not on disk with this text."""
    return [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]


def page() -> dict[Path, str]:
    """Return every file of the page with its text."""
    results = (HERE / "results.md").read_text(encoding="utf-8")
    faults = (DOCS / "guides" / "fault-tolerance.md").read_text(encoding="utf-8")
    for text, name in ((results, "results"), (faults, "faults")):
        lost = [words for words in QUOTED[name] if words not in " ".join(text.split())]
        assert not lost, f"benchmarks/report.py quotes what its source no longer says: {lost}"
    sections = {
        "training": _training(),
        "accuracy": _accuracy((DOCS / "accuracy.md").read_text(encoding="utf-8")),
        "serving": _serving(),
        "start": _start(table(results, "| target | command |")),
        "faults": _faults(table(faults, "| fault | seconds to detect |")),
    }
    heads = {
        "training": (TRAINING, NOT_TRAINING),
        "accuracy": (PREDICTION, NOT_PREDICTION),
        "serving": (SERVING, NOT_SERVING),
        "start": (START, NOT_START),
        "faults": (FAULTS, NOT_FAULTS),
    }
    text = HEAD + "".join(f"{heads[name][0]}\n{rows}{heads[name][1]}" for name, (rows, _) in sections.items())
    text += "\n" + markdown(table(results, "| nodes | 1 % lost:"))
    figures = {DOCS / "images" / f"bench-{name}.svg": figure for name, (_, figure) in sections.items()}
    return {DOCS / "benchmarks.md": text} | figures


def _training() -> tuple[str, str]:
    rows, bars = [["contest", "ours", "peer", "ratio", "lowest", "highest", "torch", "date"]], []
    for each in json.loads((HERE / "ratios.json").read_text()):
        ours, peer = OURS[each["trimaran"]], PEERS[each["peer"]]
        spread = [f"{each[key]:.2f}" if each["num"] > 1 else "" for key in ("lowest", "highest")]
        ratio, torch = f"**{each['ratio']:.2f}**", each["torch"].partition("+")[0]
        rows.append([f"`{each['contest']}`", ours, peer, ratio, *spread, torch, each["date"]])
        if each["trimaran"] != "trimaran+run":
            bars.append((f"{each['contest']} / {peer}", each["ratio"], True))
    return markdown(rows), bar_chart(bars, unit="", mark=1.0)


def _accuracy(text: str) -> tuple[str, str]:
    head, *rows = table(text, "| source | figure |")
    by_name = {(row[0], row[1]): row for row in rows}
    chosen = [by_name[name] for name in ACCURACY]
    bars = [(f"{row[0]}: {row[1]}", float(row[3].removesuffix(" %")), True) for row in chosen]
    return markdown([head, *chosen]), bar_chart(bars, unit=" %")


def _serving() -> tuple[str, str]:
    newest: dict[tuple[str, str, str], Mapping] = {}
    for line in (HERE / "h200_serving.jsonl").read_text().splitlines():
        row = json.loads(line)
        load = row["load"] + (", one user" if row["users"] == 1 else "")
        newest[row["shape"], load, row["way"]] = row
    rows, bars = [["model", "load", "engine", "tokens/s", "first token p50 ms", "between p50 ms", "date"]], []
    for (shape, load, way), row in sorted(newest.items()):
        times = [f"{row[key]:.1f}" if row.get(key) else ""
                 for key in ("first_token_p50_ms", "between_tokens_p50_ms")]  # fmt: skip
        rows.append([shape, load, way, f"{row['tokens_per_second']:,.0f}", *times, row["date"]])
        bars.append((f"{shape}, {load}: {way}", row["tokens_per_second"], way.startswith("trimaran")))
    return markdown(rows), bar_chart(bars, unit="")


def _start(rows: list[list[str]]) -> tuple[str, str]:
    return markdown(rows), bar_chart([(row[0].strip("`"), float(row[5]), True) for row in rows[1:]], unit=" s")


def _faults(rows: list[list[str]]) -> tuple[str, str]:
    peers = ("torchrun", "NVRx", "torchft")
    bars = []
    for name, _, seconds, _ in rows[1:]:
        first = seconds.partition(",")[0].partition("-")[0]
        if first.replace(".", "").isdigit():
            bars.append((name.replace("`", ""), float(first), not name.startswith(peers)))
    return markdown(rows), bar_chart(bars, unit=" s")


def table(text: str, start: str) -> list[list[str]]:
    """Return the cells of the Markdown table whose head begins with `start`, the head first."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(start))
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [rows[0], *rows[2:]]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def bar_chart(bars: Sequence[Bar], *, unit: str, mark: float | None = None) -> str:
    """Return horizontal bars as SVG; ours are blue, peers grey. `mark` draws a line at that value."""
    left, width, step = 20 + 6 * max(len(label) for label, _, _ in bars), 340, 20
    scale = width / max(value for _, value, _ in bars)
    parts = []
    for number, (label, value, is_ours) in enumerate(bars):
        top, length = 10 + number * step, value * scale
        shown, colour = f"{value:,.0f}" if value >= 100 else f"{value:.3g}", "#3b6fb6" if is_ours else "#a0a0a0"
        parts.append(
            f'<text x="{left - 8}" y="{top + 12}" text-anchor="end">{escape(label)}</text>'
            f'<rect x="{left}" y="{top}" width="{length:.1f}" height="14" fill="{colour}"/>'
            f'<text x="{left + length + 5:.1f}" y="{top + 12}">{shown}{unit}</text>'
        )
    height, across = 20 + len(bars) * step, left + width + 60
    if mark is not None:
        at = f"{left + mark * scale:.1f}"
        parts.append(f'<line x1="{at}" x2="{at}" y1="4" y2="{height - 6}" stroke="#c03030"/>')
    style = 'font-family="sans-serif" font-size="11"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {height}" {style}>\n'
        f'<rect width="{across}" height="{height}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
