"""Compares the loss on real text in fp8 and with small optimizer states with bf16 and its variation over seeds.

usage: python benchmarks/curves.py OUT.jsonl [--shape SHAPE] [--steps 500] [--arms fp8,fp8-block] [--seeds 1,2]
       python benchmarks/curves.py OUT.jsonl --table [--plot docs/images/curves.svg]      (of results that exist)

Every arm is a run of the real trainer on the text of the default recipe, Python's standard library as bytes. All run
at once on one GPU, since only their losses matter. bf16 runs with every seed; a seed determines the initial weights and
the order of the text, so the differences between seeds are the noise. The other arms run with the first `--others`
seeds. The held-out sequences are the same in every run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

SETTINGS: dict[str, list[str]] = {
    "bf16": ["plan.precision=bf16"],
    "fp8": ["plan.precision=fp8"],
    "fp8-block": ["plan.precision=fp8", "plan.fp8.recipe=block"],
    "states-bf16": ["plan.precision=bf16", "train.optimizer.states=bf16"],
    "states-8bit": ["plan.precision=bf16", "train.optimizer.states=8bit"],
}
# 104 M and 32 M parameters, with layers large enough for fp8; and a model that a CPU trains in seconds.
SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "model.shape": {"layers": 12, "hidden": 768, "heads": 12, "kv_heads": 4, "head_dim": 64, "ffn": 3072},
        "data.seq_len": 1024, "train.global_batch": 16, "train.lr": 6e-4, "train.schedule.warmup_steps": 50,
    },
    "narrow": {
        "model.shape": {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 4, "head_dim": 64, "ffn": 2048},
        "data.seq_len": 512, "train.global_batch": 16, "train.lr": 6e-4, "train.schedule.warmup_steps": 50,
    },
    "tiny": {
        "model.shape": {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128},
        "data.seq_len": 64, "train.global_batch": 8, "train.lr": 3e-3, "plan.compile": False,
    },
}  # fmt: skip
MARKS, MEAN_OVER = (100, 250, 500), 25
ROOT = Path(__file__).resolve().parents[1]
Line = dict[str, Any]


def arguments_of(arm: str, seed: int, shape: str, steps: int) -> list[str]:
    """Return the settings of one run as command-line arguments."""
    shared = SHAPES[shape] | {
        "train.steps": steps,
        "train.seed": seed,
        "train.evaluate.every": max(1, steps // 5),
        "train.evaluate.batches": 12,
        "data.holdout": 0.02,
        "plan.micro_batch": SHAPES[shape]["train.global_batch"],
        "train.save": False,
        "train.sample.tokens": 0,
        "checkpoint.every": 0,
        "checkpoint.memory": 0,
    }
    settings = [*(f"{key}={json.dumps(value)}" for key, value in shared.items()), *SETTINGS[arm]]
    return [word for setting in settings for word in ("--set", setting)]


def measure(runs: Sequence[tuple[str, int]], shape: str, steps: int, out: Path) -> list[Line]:
    """Return a line for each run, and append it to `out` when the run ends. All runs train at the same time."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        homes = {(arm, seed): Path(folder) / f"{arm}-{seed}" for arm, seed in runs}
        children = {run: start(home, arguments_of(*run, shape, steps)) for run, home in homes.items()}
        try:
            for (arm, seed), child in children.items():
                _, errors = child.communicate()
                line: Line = {"arm": arm, "seed": seed, "shape": shape, "date": time.strftime("%Y-%m-%d")}
                failed = {"failed": (errors.strip().splitlines() or ["?"])[0]}
                lines.append(line | (failed if child.returncode else course(homes[arm, seed])))
                with out.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
        finally:
            for child in children.values():
                if child.poll() is None:
                    child.terminate()  # its ranks end with it
                    child.wait()
    return lines


def start(home: Path, words: Sequence[str]) -> subprocess.Popen[str]:
    """Start a run with the run directory `home`."""
    found = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", "trimaran", "train", "--run-dir", str(home), "--json", "--quiet", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(found)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def course(run: Path) -> Line:
    """Return the results of a finished run: the loss of every step, and the held-out losses as [step, loss]."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (run / "events" / "rank-0.jsonl").read_text().splitlines()]
    return {
        "losses": [step["loss"] for step in steps],
        "held_out": [[each["step"], each["data"]["loss"]] for each in events if each["kind"] == "evaluation"],
        "tokens": sum(step["tokens"] for step in steps),
    }


def loss_at(line: Line, step: int) -> float:
    """Return the mean loss of the steps up to this one."""
    return statistics.fmean(line["losses"][max(0, step - MEAN_OVER) : step])


def table(lines: Iterable[Line]) -> str:
    """Return the losses of every run, and its distance from bf16, absolute and in standard deviations of bf16."""
    lines = list(lines)
    done = [line for line in lines if "losses" in line]
    plain = [line for line in done if line["arm"] == "bf16"]
    last = max((len(line["losses"]) for line in done), default=0)
    marks = [mark for mark in MARKS if mark < last] + [last]
    columns = ["arm", "seed", *(f"step {mark}" for mark in marks), "held out", "from bf16's mean",
               "in standard deviations", "from bf16 with the same seed"]  # fmt: skip
    rows = [_row(columns), _row(["---"] * len(columns))]
    for line in lines:
        if "failed" in line:
            rows.append(_row([line["arm"], line["seed"], line["failed"]]))
            continue
        losses = [f"{loss_at(line, mark):.4f}" for mark in marks]
        rows.append(_row([line["arm"], line["seed"], *losses, f"{held_out(line):.4f}", *distances(line, plain)]))
    if len(plain) > 1:
        found = [held_out(line) for line in plain]
        rows.append(f"\nHeld out, {len(plain)} seeds of bf16: mean {statistics.fmean(found):.4f}, "
                    f"standard deviation {statistics.stdev(found):.4f}.")  # fmt: skip
    return "\n".join(rows)


def held_out(line: Line) -> float:
    return line["held_out"][-1][1]


def distances(line: Line, plain: Sequence[Line]) -> tuple[str, str, str]:
    """Return the distance of the held-out loss from the mean of bf16, absolute and in standard deviations of bf16,
    and from bf16 with the same seed.
    """
    found = [held_out(each) for each in plain]
    if len(found) < 2:
        return "", "", ""
    away, spread = held_out(line) - statistics.fmean(found), statistics.stdev(found)
    twin = [held_out(each) for each in plain if each["seed"] == line["seed"] and each is not line]
    same = f"{held_out(line) - twin[0]:+.4f}" if twin else ""
    return f"{away:+.4f}", f"{away / spread:+.1f}" if spread else "", same


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def plot(lines: Sequence[Line]) -> str:
    """Return an SVG: the smoothed losses, and the distance of each run from the mean of bf16's seeds."""
    done = [line for line in lines if "losses" in line]
    last = min(len(line["losses"]) for line in done)
    steps = list(range(MEAN_OVER, last + 1))
    curves = {(line["arm"], line["seed"]): [loss_at(line, step) for step in steps] for line in done}
    plain = [curve for (arm, _), curve in curves.items() if arm == "bf16"]
    middle = [statistics.fmean(values) for values in zip(*plain, strict=True)]
    apart = {run: [value - mean for value, mean in zip(curve, middle, strict=True)] for run, curve in curves.items()}
    edge = max(abs(value) for curve in apart.values() for value in curve[len(curve) // 4 :]) or 1.0
    top = max(max(curve) for curve in curves.values())
    panels = _panel(curves, steps, 50, (0.0, top), f"loss, mean of {MEAN_OVER} steps")
    panels += _panel(apart, steps, 430, (-edge, edge), "minus the mean of bf16's seeds")
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 340" font-family="sans-serif" font-size="11">'
        f'<rect width="780" height="340" fill="white"/>{panels}{_legend(curves)}</svg>\n'
    )


COLOURS = {"bf16": "#999", "fp8": "#c33", "fp8-block": "#b7c", "states-bf16": "#27c", "states-8bit": "#2a7"}
WIDE, HIGH, ABOVE = 320, 250, 30


def _panel(
    curves: dict[tuple[str, int], list[float]], steps: Sequence[int], left: int, span: tuple[float, float], title: str
) -> str:
    low, high = span

    def place(step: float, value: float) -> str:
        inside = min(max(value, low), high)
        return f"{left + WIDE * step / steps[-1]:.1f} {ABOVE + HIGH * (high - inside) / (high - low):.1f}"

    parts = [f'<path d="M{left} {ABOVE}v{HIGH}h{WIDE}" fill="none" stroke="#888"/>']
    parts.append(f'<text x="{left}" y="{ABOVE - 10}">{title}</text>')
    for part in range(5):
        value, step = low + (high - low) * part / 4, steps[-1] * part / 4
        parts.append(f'<text x="{left - 5}" y="{ABOVE + HIGH * (1 - part / 4) + 4:.0f}" text-anchor="end">'
                     f"{value:.3g}</text>")  # fmt: skip
        parts.append(f'<text x="{left + WIDE * part / 4:.0f}" y="{ABOVE + HIGH + 15}" text-anchor="middle">'
                     f"{step:.0f}</text>")  # fmt: skip
    for (arm, _), curve in curves.items():
        points = " ".join(place(step, value) for step, value in zip(steps, curve, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[arm]}" stroke-width="1.1"/>')
    return "".join(parts)


def _legend(curves: Iterable[tuple[str, int]]) -> str:
    arms = list(dict.fromkeys(arm for arm, _ in curves))
    return "".join(
        f'<text x="{50 + 110 * number}" y="325" fill="{COLOURS[arm]}">{arm}</text>' for number, arm in enumerate(arms)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyrefly: ignore[missing-attribute]
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--arms", default=",".join(each for each in SETTINGS if each != "bf16"))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--others", type=int, default=1, help="how many of the seeds the other arms use")
    parser.add_argument("--table", action="store_true", help="run nothing: print the results in OUT")
    parser.add_argument("--plot", type=Path, help="write an SVG of the results in OUT")
    asked = parser.parse_args()
    if strange := [each for each in asked.arms.split(",") if each and each not in SETTINGS]:
        parser.error(f"there is no arm {strange[0]}; there are {', '.join(SETTINGS)}")
    if asked.table and not asked.out.is_file():
        parser.error(f"there is no {asked.out}: run this without --table first")
    seeds = [int(each) for each in asked.seeds.split(",")]
    if not asked.table:
        runs = [("bf16", seed) for seed in seeds]
        runs += [(arm, seed) for arm in asked.arms.split(",") if arm for seed in seeds[: asked.others]]
        began = time.monotonic()
        measure(runs, asked.shape, asked.steps, asked.out)
        print(f"{len(runs)} runs of {asked.steps} steps at once, {time.monotonic() - began:.0f} s\n")
    lines = [json.loads(line) for line in asked.out.read_text().splitlines()]
    print(table(lines))
    if asked.plot:
        asked.plot.write_text(plot(lines))


if __name__ == "__main__":
    main()
