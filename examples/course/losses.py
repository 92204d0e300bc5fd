"""The losses of several runs beside each other: `python examples/course/losses.py runs/one runs/two`."""

import json
import sys
from pathlib import Path


def losses_of(run):
    return [json.loads(line)["loss"] for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def main():
    runs = sys.argv[1:]
    print("step " + " ".join(f"{Path(run).name:>10}" for run in runs))
    for step, losses in enumerate(zip(*map(losses_of, runs), strict=True), 1):
        print(f"{step:>4} " + " ".join(f"{loss:10.5f}" for loss in losses))


if __name__ == "__main__":
    main()
