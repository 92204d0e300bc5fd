"""Steps that a run trained on two ranks and again on one: python examples/course/10-faults/compare.py RUN"""

import json
import sys
from pathlib import Path


def losses(path):
    """Return the loss of each step."""
    lines = map(json.loads, Path(path).read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


run = sys.argv[1]
before, after = losses(f"{run}-on-two.jsonl"), losses(f"{run}/metrics.jsonl")
for step in (40, 41, 60, 80):
    print(f"step {step}: loss {before[step]:.4f} on two ranks, now {after[step]:.4f}")
furthest = max(abs(before[step] - after[step]) for step in before)
print(f"all {len(before)} steps are equal to 1e-4: {furthest < 1e-4}; the run now has {max(after)} steps")
