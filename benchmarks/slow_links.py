"""Time to a held-out loss on slow links: synchronous training, compressed gradients, and fewer synchronisations.

usage: python -m benchmarks.slow_links OUT.jsonl [--links LINK,…] [--methods METHOD,…] [--course 300] [--timed 60]
       python -m benchmarks.slow_links OUT.jsonl --table

Two nodes with one CPU rank each, in two network namespaces (needs root), train a decoder of 0.8 million parameters with
the real supervisor. A process relays every packet between them and delays, limits and drops them as the link says.
Three kinds of lines are written. `course`: a whole run on an unlimited link, with the held-out loss every ten steps; no
link changes the losses, so it also says how many steps a method takes to a loss on every link. `timed`: a short run on
a link, with the seconds of its steps; the table shows what the cost model predicts for them today. `whole`: a whole run
on a link, which shows that steps times seconds is the time to a loss that it really takes (`--whole LINK`).
"""

import argparse
import json
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.nodes import TwoMachines

from trimaran.core import Plan, Recipe, parse_recipe
from trimaran.data import cache_folder, prepare
from trimaran.hardware import parse_cluster
from trimaran.models import spec_of
from trimaran.planner import choose
from trimaran.run import RunDirectory, create_run

MAX_SECONDS = 1200.0
EVALUATED = 10  # steps from one evaluation to the next
SKIPPED = 3  # first steps, in which buffers are made and connections speed up


@dataclass(frozen=True, slots=True)
class LinkShape:
    """Mbit/s each way, the round trip in seconds, and the fraction of packets that are lost; 0 Mbit/s is no limit."""

    megabits: float = 0.0
    round_trip: float = 0.0
    loss: float = 0.0

    @property
    def flags(self) -> list[str]:
        return ["--rate", str(self.megabits), "--delay", str(self.round_trip / 2), "--loss", str(self.loss)]


LINKS = {
    "unlimited": LinkShape(),
    "1gbit-20ms": LinkShape(1000, 0.02),
    "100mbit-50ms": LinkShape(100, 0.05),
    "100mbit-5ms": LinkShape(100, 0.005),
    "1gbit-20ms-loss": LinkShape(1000, 0.02, 0.01),
}
NESTEROV = {"optimizer": "nesterov"}
METHODS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "bf16": {"compression": "bf16"},
    "int8": {"compression": "int8"},
    "1bit": {"compression": "1bit"},
    "topk": {"compression": {"kind": "topk", "ratio": 0.05, "warmup_steps": 20}},
    "powersgd": {"compression": "powersgd"},
    "local-10": {"local_steps": 10},
    "local-10-int8": {"local_steps": {"steps": 10, "compression": "int8"}},
    "local-30-int8": {"local_steps": {"steps": 30, "compression": "int8"}},
    "diloco-10": {"local_steps": {"steps": 10, "outer": NESTEROV}},
    "diloco-10-int8-overlap": {
        "local_steps": {"steps": 10, "outer": NESTEROV, "fragments": 2, "overlap_steps": 3, "compression": "int8"}
    },
    "sparse-10": {"local_steps": {"steps": 10, "outer": {"optimizer": "sgd"}, "compression": "sparse"}},
}


def planned(method: str, link: str, folder: Path, *, steps: int, evaluates: bool) -> tuple[Recipe, Plan]:
    """Return the recipe of a run and its plan, with what the cost model predicts for this link."""
    settings = {
        "model": {"preset": "tiny", "shape": {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 4, "ffn": 384}},
        "data": {"seq_len": 64},
        "train": {"steps": steps, "global_batch": 16, "lr": 3e-3, "save": False, "sample": {"tokens": 0},
                  "evaluate": {"every": EVALUATED if evaluates else 0, "batches": 8 if evaluates else 0}},
        "checkpoint": {"every": 0, "memory": 0},
        "cluster": "2x1xcpu",
        "plan": {"mesh": {"dp_replicate": 2}, "grad_accum": 1, "comm": METHODS[method]},
    }  # fmt: skip
    recipe = parse_recipe(json.dumps(settings), name="slow-links")
    cluster = parse_cluster(_cluster_file(folder, LINKS[link]) if LINKS[link].megabits else recipe.cluster)
    return recipe, choose(recipe, spec_of(recipe.model), cluster)


def train(method: str, link: str, steps: int, *, evaluates: bool) -> dict[str, Any]:
    """Train on a link and return the seconds of each step and the held-out losses."""
    with tempfile.TemporaryDirectory() as folder:
        recipe, plan = planned(method, link, Path(folder), steps=steps, evaluates=evaluates)
        prepare(recipe.data, cache=cache_folder(os.environ))
        run = create_run(Path(folder) / "run", recipe, plan)
        without_pause = {"TRIMARAN_TEST_PAUSE": "0"}
        with TwoMachines(run, wire=LINKS[link].flags, environments=(without_pause, without_pause)) as machines:
            codes = [machine.wait(MAX_SECONDS) for machine in machines.all]
        assert codes == [0, 0], [machine.log.read_text()[-2000:] for machine in machines.all]
        seconds = [each["step_seconds"] for each in _lines(run.metrics)]
        return {"method": method, "link": link, "seconds": seconds, "losses": _held_out(run)}


def predicted_seconds(method: str, link: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        _, plan = planned(method, link, Path(folder), steps=300, evaluates=False)
    assert plan.prediction is not None
    return plan.prediction.step_seconds


def _cluster_file(folder: Path, link: LinkShape) -> str:
    network = {"name": "network", "gb_per_second": link.megabits / 8e3, "latency_us": 1e6 * link.round_trip / 2}
    tree = {"device": "cpu", "num_nodes": 2, "devices_per_node": 1, "links": [network]}
    path = folder / "cluster.yaml"
    path.write_text(json.dumps(tree))
    return str(path)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _held_out(run: RunDirectory) -> dict[int, float]:
    return {each["step"]: each["data"]["loss"] for each in _lines(run.events(0)) if each["kind"] == "evaluation"}


def steps_to(loss: float, line: dict[str, Any]) -> int | None:
    """Return after how many steps the held-out loss of a run was at most `loss`; None if it never was."""
    reached = (int(step) for step, value in line["losses"].items() if value <= loss)
    return min(reached, default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--links", default=",".join(name for name in LINKS if name != "unlimited"))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--course", type=int, default=300, help="steps of a whole run; 0: none")
    parser.add_argument("--timed", type=int, default=60, help="steps of a timed run; 0: none")
    parser.add_argument("--whole", choices=LINKS, help="also train whole runs on this link")
    parser.add_argument("--table", action="store_true", help="only print the table of what was measured")
    flags = parser.parse_args()
    if not flags.table:
        for kind, line in measure(flags):
            with flags.out.open("a") as file:
                file.write(json.dumps({"kind": kind} | line) + "\n")
            print(kind, line["method"], line["link"], f"{mean_seconds(line):.3f} s a step", flush=True)
    print_table(_lines(flags.out))


def measure(flags: argparse.Namespace) -> Any:
    """Yield each kind of line that was asked for and is not in the file yet."""
    done = {(each["kind"], each["method"], each["link"]) for each in _lines(flags.out)} if flags.out.exists() else set()
    methods, links = flags.methods.split(","), flags.links.split(",")
    jobs = [("course", each, "unlimited", flags.course) for each in methods]
    jobs += [("timed", each, link, flags.timed) for link in links for each in methods]
    jobs += [("whole", each, flags.whole, flags.course) for each in methods if flags.whole]
    for kind, method, link, steps in jobs:
        if steps and (kind, method, link) not in done:
            yield kind, train(method, link, steps, evaluates=kind != "timed")


def mean_seconds(line: dict[str, Any]) -> float:
    """Return the mean seconds of the steps after the first ones: those with a synchronisation take longer."""
    return statistics.mean(line["seconds"][SKIPPED:])


def print_table(lines: list[dict[str, Any]]) -> None:
    """Print, for each link and method, the seconds of a step, what was predicted, and the time to the loss."""
    courses = {each["method"]: each for each in lines if each["kind"] == "course"}
    if "synchronous" not in courses:
        return
    exactly = [*courses["synchronous"]["losses"].values()]
    target = exactly[len(exactly) // 2 - 1]  # what synchronous training reaches in half of its steps
    wholes = {(each["method"], each["link"]): each for each in lines if each["kind"] == "whole"}
    print(f"\nto a held-out loss of {target:.3f}")
    print("| link | method | s a step | predicted | steps | s to the loss | times as fast |")
    print("|---|---|--:|--:|--:|--:|--:|")
    exact: dict[str, float] = {}
    for line in (each for each in lines if each["kind"] == "timed" and each["method"] in courses):
        seconds, steps = mean_seconds(line), steps_to(target, courses[line["method"]])
        total = seconds * steps if steps else None
        if line["method"] == "synchronous" and total:
            exact[line["link"]] = total
        gain = f"{exact[line['link']] / total:.1f}" if total and line["link"] in exact else "-"
        whole = wholes.get((line["method"], line["link"]))
        in_full = steps_to(target, whole) if whole else None
        measured = f" ({sum(whole['seconds'][:in_full]):.0f} in a whole run)" if whole and in_full else ""
        predicted = predicted_seconds(line["method"], line["link"])
        print(f"| {line['link']} | {line['method']} | {seconds:.3f} | {predicted:.3f} | {steps or '-'} | "
              f"{f'{total:.0f}' if total else '-'}{measured} | {gain} |")  # fmt: skip


if __name__ == "__main__":
    main()
