"""Trains on two ranks and kills one of them: python examples/course/10-faults/lesson.py RUN"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from trimaran.app.drill.inject import find_processes
from trimaran.runs import RunDirectory

RECIPE = Path(__file__).parent / "recipe.yaml"
KILL_AFTER = 10  # steps


def finished_steps(run):
    """Return the numbers of the steps in the metrics, in the order in which they were trained."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines]


def main():
    run = Path(sys.argv[1])
    command = [sys.executable, "-m", "trimaran", "train", str(RECIPE), "--run-dir", str(run), "--quiet", "--no-check"]
    training = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while len(finished_steps(run)) < KILL_AFTER and training.poll() is None:
        time.sleep(0.01)
    find_processes(RunDirectory(run)).rank(1).kill()
    print("rank 1 got SIGKILL")
    code = training.wait()
    steps = finished_steps(run)
    print(f"exit code {code}, the metrics have steps {steps[0]} to {steps[-1]}, each once: {len(steps) == steps[-1]}")
    shutil.copy(run / "metrics.jsonl", f"{run}-on-two.jsonl")  # a resume from an older step writes its steps again


if __name__ == "__main__":
    main()
