"""A link that degrades in the middle of a run and recovers, with and without the autopilot.

usage: python -m benchmarks.degraded_link [--modes off,act] [--megabits 300] [--degraded 15] [--phases 50,110,110]
       [--set a.b=c] [--json]

Two nodes with one CPU rank each, in two network namespaces (needs root), train with the real supervisor. A process
relays every packet between them, and from some step to another it has fewer Mbit/s for them. The decoder is small, and
each of its layers sleeps for its rows: compute takes as long as on a machine that nobody else uses. Each phase of the
run is measured by the median of its last 20 steps.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.nodes import TwoMachines
from tests.fault.harness import lines, wait_for

from trimaran.core import parse_recipe
from trimaran.data import cache_folder, prepare
from trimaran.machine import parse_cluster
from trimaran.models import spec_of
from trimaran.planner import choose
from trimaran.runs import RunDirectory, create_run

MAX_SECONDS = 1800.0
MEASURED_STEPS = 20  # the last ones of a phase
ROUND_TRIP = 0.0005  # seconds
ROW_SECONDS = 0.012  # of a layer's forward; backward takes twice as long
PHASES = "before", "degraded", "recovered"
SETTINGS = (
    "model.preset=tiny",
    "model.shape={layers: 3, hidden: 128, heads: 4, kv_heads: 4, ffn: 384}",
    "data.seq_len=32",
    "train={global_batch: 8, lr: 3.0e-3, save: false, sample: {tokens: 0}, evaluate: {every: 0, batches: 0}}",
    "checkpoint.every=0",
    "cluster=2x1xcpu",
    "plan={mesh: {dp_replicate: 2}, grad_accum: 1}",
)


def make_run(path: Path, settings: Sequence[str]) -> RunDirectory:
    recipe = parse_recipe("", name="degraded-link", overrides=[*SETTINGS, *settings])
    prepare(recipe.data, cache=cache_folder(os.environ))
    return create_run(path, recipe, choose(recipe, spec_of(recipe.model), parse_cluster(recipe.cluster)))


def train(path: Path, mode: str, flags: argparse.Namespace) -> dict[str, Any]:
    """Train through all phases and return what was measured and decided."""
    ends = [sum(flags.phases[: number + 1]) for number in range(len(PHASES))]
    run = make_run(path, [f"train.steps={ends[-1]}", f"autopilot={{mode: {mode}, budget: 0.2}}", *flags.settings])
    rates = [flags.megabits, flags.degraded, flags.megabits]
    link = ["--rate", str(flags.megabits), "--delay", str(ROUND_TRIP / 2)]
    environment = {"TRIMARAN_TEST_PLUGIN": "tests.fault.sleeping_layers", "TRIMARAN_TEST_ROW_SECONDS": str(ROW_SECONDS)}
    with TwoMachines(run, "--no-check", wire=link, environments=(environment, environment)) as machines:
        for end, rate in zip(ends, rates, strict=True):
            machines.shape_wire(delay=ROUND_TRIP / 2, rate=rate)
            wait_for(lambda last=end: machines.step() >= last, MAX_SECONDS)
        codes = [machine.wait(60) for machine in machines.all]
    assert codes == [0, 0], [machine.log.read_text()[-2000:] for machine in machines.all]
    steps = {each["step"]: each for each in lines(run.metrics)}
    medians = {
        name: statistics.median(steps[step]["step_seconds"] for step in range(end - MEASURED_STEPS + 1, end + 1))
        for name, end in zip(PHASES, ends, strict=True)
    }
    whole = sum(each["step_seconds"] for each in steps.values())
    decisions = {each["id"]: each for each in lines(run.decisions)}
    return {
        "mode": mode,
        "seconds": medians,
        "whole_seconds": whole,
        "load": os.getloadavg()[1],
        "last_loss": steps[ends[-1]]["loss"],
        "decisions": [*decisions.values()],
        "step_seconds": [round(each["step_seconds"], 3) for each in steps.values()],
        "comm": {str(end): steps[end].get("comm_seconds") for end in ends},
    }


def show(found: dict[str, Any]) -> None:
    medians = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in found["seconds"].items())
    print(f"autopilot {found['mode']}: {medians}; all steps {found['whole_seconds']:.0f} s; last loss "
          f"{found['last_loss']:.6f}; load {found['load']:.1f}", flush=True)  # fmt: skip
    for each in found["decisions"]:
        measured = each["measured"] or {}
        print(f"  {each['id']} {each['outcome']} at step {each['step']}: {each['reason']}; expected "
              f"{each['expected'].get('gain', 0):.0%}, measured {measured.get('gain', 0):.0%}, pauses "
              f"{measured.get('pause_seconds', 0):.1f} s", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default="off,act", type=lambda text: text.split(","))
    parser.add_argument("--megabits", type=float, default=300.0, help="Mbit/s each way; 0: no limit")
    parser.add_argument("--degraded", type=float, default=15.0)
    parser.add_argument("--phases", default=[50, 110, 110], help="steps of each phase",
                        type=lambda text: [int(each) for each in text.split(",")])  # fmt: skip
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    for mode in flags.modes:
        with tempfile.TemporaryDirectory() as folder:
            found = train(Path(folder) / "run", mode, flags)
        print(json.dumps(found), flush=True) if flags.json else show(found)


if __name__ == "__main__":
    main()
