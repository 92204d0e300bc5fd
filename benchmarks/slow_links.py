"""Time to a held-out loss on slow links: synchronous training, compressed gradients, and fewer synchronisations.

usage: python -m benchmarks.slow_links OUT.jsonl [--links LINK,…] [--methods METHOD,…] [--course 300] [--timed 60]
       python -m benchmarks.slow_links OUT.jsonl --table
       python -m benchmarks.slow_links OUT.jsonl --cases [all | LINK/NODES/SIZE,…]

Two to four nodes with one CPU rank each, in network namespaces (needs root), train a decoder of 0.8 million parameters
with the real supervisor. A process relays every packet between them and delays, limits and drops them as the link says.
`--cases` compares the predicted seconds of a step with those measured, for links, numbers of nodes and sizes of the
model (`CASES`). How much slower the CPU is than the cost model assumes is taken from steps without communication: those
of local-10 between two synchronisations.

Otherwise three kinds of lines are written. `course`: a whole run on an unlimited link, with the held-out loss every ten
steps; no link changes the losses, so it also says how many steps a method takes to a loss on every link. `timed`: a
short run on a link, with the seconds of its steps; the table shows what the cost model predicts for them today.
`whole`: a whole run on a link, which shows that steps times seconds is the time to a loss that it really takes
(`--whole LINK`).
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tests.chaos.nodes import TwoMachines

from trimaran.core import Flops, Plan, Prediction, Recipe, parse_recipe
from trimaran.data import cache_folder, prepare
from trimaran.machine import Device, parse_cluster
from trimaran.models import spec_of
from trimaran.planner import choose
from trimaran.runs import RunDirectory, create_run

MAX_SECONDS = 1200.0
EVALUATED = 10  # steps from one evaluation to the next
CASE_STEPS, CASE_BATCH = 20, 12  # a batch that 2, 3 and 4 nodes split
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
    "100mbit-50ms-loss": LinkShape(100, 0.05, 0.01),
    "20mbit-20ms": LinkShape(20, 0.02),
}
SIZES: dict[str, dict[str, int]] = {
    "0.8M": {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 4, "ffn": 384},
    "3.2M": {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 768},
}


class Case(NamedTuple):
    """A link, how many nodes it joins, and the size of the model."""

    link: str
    nodes: int = 2
    size: str = "0.8M"

    def __str__(self) -> str:
        return f"{self.link}/{self.nodes}/{self.size}"


CASES = (
    Case("100mbit-50ms"),
    Case("100mbit-50ms", 3),
    Case("100mbit-50ms", 4),
    Case("100mbit-50ms-loss"),
    Case("100mbit-5ms"),
    Case("100mbit-5ms", 2, "3.2M"),
    Case("20mbit-20ms"),
    Case("20mbit-20ms", 3),
    Case("1gbit-20ms", 2, "3.2M"),
    Case("1gbit-20ms-loss"),
)
CASE_METHODS = ("synchronous", "int8", "powersgd", "local-10", "local-10-int8", "diloco-10")
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


def planned(
    method: str,
    case: Case,
    folder: Path,
    *,
    steps: int,
    evaluates: bool,
    batch: int = 16,
    slowdown: float = 1.0,
) -> tuple[Recipe, Plan]:
    """Return the recipe of a run and its plan, with what the cost model predicts for this link."""
    settings = {
        "model": {"preset": "tiny", "shape": SIZES[case.size]},
        "data": {"seq_len": 64},
        "train": {"steps": steps, "global_batch": batch, "lr": 3e-3, "save": False, "sample": {"tokens": 0},
                  "evaluate": {"every": EVALUATED if evaluates else 0, "batches": 8 if evaluates else 0}},
        "checkpoint": {"every": 0, "memory": 0},
        "cluster": f"{case.nodes}x1xcpu",
        "plan": {"mesh": {"dp_replicate": case.nodes}, "grad_accum": 1, "comm": METHODS[method]},
    }  # fmt: skip
    recipe = parse_recipe(json.dumps(settings), name="slow-links")
    cluster = parse_cluster(_cluster_file(folder, case) if LINKS[case.link].megabits else recipe.cluster)
    if slowdown != 1:
        cluster = replace(cluster, device=slower(cluster.device, slowdown))
    return recipe, choose(recipe, spec_of(recipe.model), cluster)


def train(method: str, case: Case, steps: int, *, evaluates: bool, batch: int = 16) -> dict[str, Any]:
    """Train on a link and return the seconds of each step and the held-out losses."""
    with tempfile.TemporaryDirectory() as folder:
        recipe, plan = planned(method, case, Path(folder), steps=steps, evaluates=evaluates, batch=batch)
        prepare(recipe.data, cache=cache_folder(os.environ))
        run = create_run(Path(folder) / "run", recipe, plan)
        environment = {"TRIMARAN_TEST_PAUSE": "0", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        shape = LINKS[case.link].flags
        with TwoMachines(run, wire=shape, environments=[environment] * case.nodes) as machines:
            codes = [machine.wait(MAX_SECONDS) for machine in machines.all]
        assert codes == [0] * case.nodes, [machine.log.read_text()[-2000:] for machine in machines.all]
        lines = _lines(run.metrics)
        exchanges = [each["outer"]["seconds"] for each in lines if "outer" in each]
        return {
            "method": method,
            "link": case.link,
            "seconds": [each["step_seconds"] for each in lines],
            "losses": _held_out(run),
            "exchanges": exchanges,
        }


def predicted(method: str, case: Case, *, batch: int = 16, slowdown: float = 1.0) -> Prediction:
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"steps": 300, "evaluates": False, "batch": batch, "slowdown": slowdown}
        _, plan = planned(method, case, Path(folder), **settings)
    assert plan.prediction is not None
    return plan.prediction


def slower(device: Device, factor: float) -> Device:
    """Return the device as if it computed so many times as slowly."""
    return replace(
        device,
        peak_flops={name: Flops(each / factor) for name, each in device.peak_flops.items()},
        reached={name: each / factor for name, each in device.reached.items()},
        memory_bandwidth=device.memory_bandwidth / factor,
    )


def slowdown_in(case: Case, line: dict[str, Any]) -> float:
    """Return how many times as long as predicted this CPU computes, from the steps of a local-10 run that send nothing.

    The first ones are left out, and so is the one after a synchronisation.
    """
    alone = [each for number, each in enumerate(line["seconds"], 1) if number > 10 and number % 10 not in (0, 1)]
    terms = predicted("local-10", case, batch=CASE_BATCH).time
    return statistics.median(alone) / sum(each for name, each in terms.items() if name != "comm")


def measure_cases(out: Path, cases: Sequence[Case], methods: Sequence[str]) -> None:
    """Train each method in each case that is not in the file yet, and write its seconds and the load of the machine."""
    done = {(each["case"], each["method"]) for each in _lines(out) if each["kind"] == "case"} if out.exists() else set()
    for case in cases:
        missing = [each for each in methods if (str(case), each) not in done]
        for method in missing:
            is_short = "local_steps" not in METHODS[method] and method != "powersgd"
            steps = SKIPPED + CASE_STEPS // 4 if is_short else CASE_STEPS
            line = train(method, case, steps, evaluates=False, batch=CASE_BATCH)
            line |= {"kind": "case", "case": str(case), "load": os.getloadavg()[0]}
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(case, method, f"{case_seconds(line):.3f} s a step", flush=True)


def case_seconds(line: dict[str, Any]) -> float:
    """Return the mean seconds of a step after the first ones; with local steps, from one synchronisation to another."""
    if "local_steps" in METHODS[line["method"]]:
        return statistics.mean(line["seconds"][10:])
    if line["method"] == "powersgd":  # it begins with exact steps
        return statistics.median(line["seconds"][-5:])
    return statistics.median(line["seconds"][SKIPPED:])


def print_cases(lines: Sequence[dict[str, Any]]) -> None:
    """Print for each case and method the seconds measured and predicted, and which method is the fastest."""
    found = [each for each in lines if each["kind"] == "case"]
    print("| link | nodes | parameters | load | " + " | ".join(CASE_METHODS) + " | fastest: measured, predicted |")
    print("|---|--:|--:|--:|" + "--:|" * len(CASE_METHODS) + "---|")
    for case in CASES:
        of_case = {each["method"]: each for each in found if each["case"] == str(case)}
        if "local-10" not in of_case:
            continue
        seconds = {name: case_seconds(each) for name, each in of_case.items()}
        slowdown = slowdown_in(case, of_case["local-10"])
        expected = {name: predicted(name, case, batch=CASE_BATCH, slowdown=slowdown).step_seconds for name in of_case}
        cells = [f"{seconds[name]:.3f}, {expected[name]:.3f}" if name in seconds else "-" for name in CASE_METHODS]
        load = statistics.mean(each["load"] for each in of_case.values())
        best = [min(each, key=lambda name: each[name]) for each in (seconds, expected)]
        print(f"| {case.link} | {case.nodes} | {case.size} | {load:.0f} | {' | '.join(cells)} | {', '.join(best)} |")


def _cluster_file(folder: Path, case: Case) -> str:
    link = LINKS[case.link]
    network = {"name": "network", "gb_per_second": link.megabits / 8e3, "latency_us": 1e6 * link.round_trip / 2}
    tree = {"device": "cpu", "num_nodes": case.nodes, "devices_per_node": 1, "links": [network]}
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
    parser.add_argument("--cases", help="compare predictions in these cases: all, or LINK/NODES/SIZE,…")
    flags = parser.parse_args()
    if flags.cases:
        chosen = [each for each in CASES if flags.cases == "all" or str(each) in flags.cases.split(",")]
        named = [each for each in flags.methods.split(",") if each in CASE_METHODS]
        if not flags.table:
            measure_cases(flags.out, chosen, named)
        print_cases(_lines(flags.out))
        return
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
            yield kind, train(method, Case(link), steps, evaluates=kind != "timed")


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
        expected = predicted(line["method"], Case(line["link"])).step_seconds
        print(f"| {line['link']} | {line['method']} | {seconds:.3f} | {expected:.3f} | {steps or '-'} | "
              f"{f'{total:.0f}' if total else '-'}{measured} | {gain} |")  # fmt: skip


if __name__ == "__main__":
    main()
