"""Offload to a disk, measured beside the same training in memory: losses, seconds of a step, and host memory.

usage: python benchmarks/disk_offload.py OUT.jsonl --folder DIR [--runs 1b/none,1b/optimizer/disk] [--steps 4]
                                         [--limit-gib 16] [--together]
       python benchmarks/disk_offload.py OUT.jsonl --table      (of results that exist; no GPU is needed)

A run is MODEL/OFFLOAD, with /disk if the tensors are in files. Each is a process with the real trainer in bf16, rows of
2,048 tokens, eager, deterministic, without checkpoints, and writes one line. First the disk is measured, as
`trimaran bench calibrate --disk` does; the table predicts the seconds of a step with these rates and today's formulas.
`--limit-gib` runs the process in a control group with this much memory, where the system allows it. `--together` starts
all runs at once: only losses matter.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).absolute().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # instead of this folder, whose file names shadow libraries
GIB = 2**30
SHAPE = {"layers": 12, "hidden": 1024, "heads": 16, "kv_heads": 16, "head_dim": 64, "ffn": 2816}
MODELS: dict[str, tuple[dict[str, Any], int]] = {  # model section, tokens of a row
    "1b": ({"preset": "llama-3.2-1b"}, 2048),
    "3b": ({"preset": "llama-3.2-3b"}, 2048),
    # For a CPU, in fp32. So few tokens that the disk is what a step waits for.
    "tiny": ({"preset": "tiny"}, 64),
    "150m": ({"preset": "tiny", "shape": SHAPE}, 16),
}
ON_CPU = ("tiny", "150m")
GROUPS = Path("/sys/fs/cgroup")
DISK_SECONDS = 4.0
SAMPLED = ("RssAnon", "RssFile", "RssShmem")  # of /proc/self/status
Line = dict[str, Any]


def plan_fields(name: str, folder: str) -> dict[str, Any]:
    """Return the plan of a run."""
    model, offload, *place = name.split("/")
    fields: dict[str, Any] = {"precision": "bf16", "micro_batch": 1, "grad_accum": 1, "offload": offload}
    fields |= {"sharding": "parameters"} if offload == "parameters" else {}
    fields |= {"precision": "fp32"} if model in ON_CPU else {}
    return fields | ({"disk": {"path": folder}} if place == ["disk"] else {})


class MemorySampler(threading.Thread):
    """Records the most host memory that this process has at a time, by kind, and the least that the system has left."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most: dict[str, int] = dict.fromkeys((*SAMPLED, "all"), 0)
        self.least_available = sys.maxsize

    def run(self) -> None:
        while True:
            now = _numbers("/proc/self/status")
            found = {key: now.get(key, 0) for key in SAMPLED} | {"all": sum(now.get(key, 0) for key in SAMPLED)}
            self.most = {key: max(self.most[key], value) for key, value in found.items()}
            self.least_available = min(self.least_available, _numbers("/proc/meminfo")["MemAvailable"])
            time.sleep(0.1)


def _numbers(path: str) -> dict[str, int]:
    """Return the sizes in a file of /proc, in bytes."""
    pairs = (line.partition(":")[::2] for line in Path(path).read_text().splitlines() if line.endswith("kB"))
    return {name: int(text.split()[0]) * 1024 for name, text in pairs}


def train(name: str, folder: str, steps: int) -> Line:
    """Train a few steps in this process; return the measurements."""
    from trimaran.core import Plan, Recipe  # noqa: PLC0415 - before torch, which reads the environment
    from trimaran.runs.rank_environment import worker_environment  # noqa: PLC0415

    plan = Plan.model_validate(plan_fields(name, folder))
    on_cpu = name.split("/")[0] in ON_CPU
    os.environ.update(worker_environment(os.environ, plan, on_cpu=on_cpu, deterministic=True))
    import torch  # noqa: PLC0415
    from benchmarks.peers.ours import trainer  # noqa: PLC0415

    model, seq_len = MODELS[name.split("/")[0]]
    quiet = {"deterministic": True, "save": False, "sample": {"tokens": 0}, "evaluate": {"batches": 0}}
    recipe = Recipe.model_validate(
        {"model": model, "data": {"seq_len": seq_len}, "checkpoint": {"every": "off", "memory": 0},
         "train": {"steps": steps, "global_batch": 1, **quiet}}
    )  # fmt: skip
    run_steps, before, sampler = trainer(), _numbers("/proc/meminfo")["MemAvailable"], MemorySampler()
    sampler.start()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        run_steps(Path(home) / "run", recipe, plan)
        lines = [json.loads(line) for line in (Path(home) / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        "losses": [line["loss"] for line in lines],
        "grad_norms": [line["grad_norm"] for line in lines],
        "step_seconds": [round(line["step_seconds"], 4) for line in lines],
        "phases": [{key: round(value, 4) for key, value in line["phases"].items()} for line in lines],
        "peak_bytes": lines[-1]["peak_bytes"],
        "host_bytes": sampler.most,
        "taken_bytes": before - sampler.least_available,
        "whole_seconds": round(time.monotonic() - began, 1),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "plan": plan.model_dump(mode="json", exclude_defaults=True),
    }


def memory_group(limit_bytes: int) -> tuple[Path | None, str]:
    """Return a control group with this much memory, and why there is none."""
    is_first = (GROUPS / "memory").is_dir()  # version 1
    group = (GROUPS / "memory" if is_first else GROUPS) / f"disk-offload-{os.getpid()}"
    try:
        if not is_first:
            (GROUPS / "cgroup.subtree_control").write_text("+memory")
        group.mkdir(exist_ok=True)
        (group / ("memory.limit_in_bytes" if is_first else "memory.max")).write_text(str(limit_bytes))
    except OSError as error:
        return None, str(error)
    return group, ""


def group_peak(group: Path) -> int | None:
    """Return the most memory that the processes of a group have had, with their pages of files."""
    for file in (group / "memory.peak", group / "memory.max_usage_in_bytes"):
        if file.exists():
            return int(file.read_text())
    return None


def start(name: str, folder: str, steps: int, group: Path | None) -> subprocess.Popen[str]:
    """Start the process of one run, in the control group if there is one."""
    command = [sys.executable, __file__, "--one", name, folder, str(steps)]
    if group is not None:
        command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(name: str, child: subprocess.Popen[str], facts: Line, group: Path | None, out: Path) -> None:
    """Wait for a run, and append its line to `out`."""
    text, errors = child.communicate()
    written = text.strip().splitlines()
    line = {"name": name, "date": time.strftime("%Y-%m-%d"), **facts}
    line |= json.loads(written[-1]) if child.returncode == 0 and written else {"failed": errors[-1500:]}
    if group is not None:
        line["group_peak_bytes"] = group_peak(group)
        group.rmdir()
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    shown = ("losses", "step_seconds", "phases", "host_bytes", "group_peak_bytes", "whole_seconds", "failed")
    print(name, json.dumps({key: line[key] for key in shown if key in line}), flush=True)


def measure(names: Sequence[str], asked: argparse.Namespace) -> None:
    """Measure the disk, then every run in turn, or all together."""
    from trimaran.machine.probe.calibrate import measure_disk  # noqa: PLC0415

    facts: Line = {}
    if any(name.endswith("/disk") for name in names):
        facts["rates"] = measure_disk(Path(asked.folder), seconds=asked.disk_seconds)
        print(json.dumps(facts), flush=True)
    if asked.together:
        children = {name: start(name, asked.folder, asked.steps, None) for name in names}
        for name, child in children.items():
            finish(name, child, facts, None, asked.out)
        return
    for name in names:
        group, why = memory_group(int(asked.limit_gib * GIB)) if asked.limit_gib else (None, "")
        limit = {"limit_bytes": int(asked.limit_gib * GIB)} if group else {"no_limit": why} if why else {}
        finish(name, start(name, asked.folder, asked.steps, group), facts | limit, group, asked.out)


def predicted(line: Line) -> tuple[float, float]:
    """Return the seconds of a step and the bytes of host memory, predicted with the measured rates of the disk."""
    from trimaran.core import ModelSection, Plan  # noqa: PLC0415
    from trimaran.cost import Job, predict  # noqa: PLC0415
    from trimaran.machine import Calibration, apply_calibration, parse_cluster  # noqa: PLC0415
    from trimaran.models import outline_of, spec_of  # noqa: PLC0415

    model, seq_len = MODELS[line["name"].split("/")[0]]
    cluster = parse_cluster("1xcpu" if line["device"] == "CPU" else "1x" + line["device"].removeprefix("NVIDIA "))
    if "rates" in line:
        cluster = apply_calibration(cluster, Calibration.model_validate({"disk": line["rates"]}))
    job = Job(outline=outline_of(spec_of(ModelSection.model_validate(model))), seq_len=seq_len)
    found = predict(job, cluster, Plan.model_validate(line["plan"]))
    return found.step_seconds, found.host_bytes


def table(lines: Iterable[Line]) -> str:
    """Return a Markdown table: seconds of a step, measured and predicted, host memory, and whether bits are equal."""
    done = [line for line in lines if "losses" in line]
    rows = [
        "| run | step, s | predicted | error | host GiB | predicted | same bits as |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in done:
        seconds, host = predicted(line)
        # The first step also allocates buffers and compiles kernels.
        step = statistics.median(line["step_seconds"][1:] or line["step_seconds"])
        cells = [
            line["name"], f"{step:.2f}", f"{seconds:.2f}", f"{100 * (seconds / step - 1):+.0f} %",
            f"{line['host_bytes']['all'] / GIB:.1f}", f"{host / GIB:.1f}", ", ".join(equal_runs(line, done)),
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def equal_runs(line: Line, lines: Iterable[Line]) -> list[str]:
    """Return the other runs whose losses and gradient norms are the same, bit for bit, in every step of both."""

    def course(of: Line) -> list[tuple[float, float]]:
        return list(zip(of["losses"], of["grad_norms"], strict=True))

    return [
        each["name"] for each in lines
        if each["name"] != line["name"] and all(a == b for a, b in zip(course(line), course(each), strict=False))
    ]  # fmt: skip


def main() -> None:
    if sys.argv[1] == "--one":
        try:
            print(json.dumps(train(sys.argv[2], sys.argv[3], int(sys.argv[4]))), flush=True)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyrefly: ignore[missing-attribute]
    parser.add_argument("out", type=Path)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--runs", default="1b/none,1b/optimizer/disk,1b/parameters,1b/parameters/disk")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit-gib", type=float, default=0)
    parser.add_argument("--disk-seconds", type=float, default=DISK_SECONDS)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--table", action="store_true", help="run nothing: print the results in OUT")
    asked = parser.parse_args()
    if not asked.table:
        measure(asked.runs.split(","), asked)
    print(table([json.loads(line) for line in asked.out.read_text().splitlines()]))


if __name__ == "__main__":
    main()
