"""Rehearses ranks of multi-GPU plans on this machine's GPU: measured peaks and compute beside the predictions.

usage: python benchmarks/rehearsals.py RESULTS.jsonl [--known RESULTS.jsonl] [--seconds 440] [--only NAME,..]
                                       [--steps 4] [--tiny]
       python benchmarks/rehearsals.py --table RESULTS.jsonl [MORE.jsonl ...]

Every plan is one process and one line: what was measured, what is predicted for the same rank, and the error of the
prediction. Layers are few, so that the share of a rank of a 70B model fits and builds quickly; predicted is the same
small model, so nothing is extrapolated. Processes import and build while one uses the device; none starts after
`--seconds`. The plan is given in full, so no measurement depends on a prediction. `--tiny` runs the same plans with
tiny shapes on a CPU, to test this script. `--table` compares existing results with today's predictions;
`h200_rehearsals.jsonl` are those of 2026-11-17 on one H200 (torch 2.11), and `h200_vision.jsonl` those of 2026-11-18
of the plans in `vision_plans.py`, which have vision-language and perception models.
"""

# ruff: noqa: PLC0415 - torch is imported by the processes that measure, not by the one that starts them

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import IO, Any

ROOT = Path(__file__).absolute().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # instead of this folder, whose file names shadow libraries
MAX_STARTED = 3  # processes; the next ones import while one uses the device
DEFAULTS: dict[str, Any] = {"precision": "bf16", "loss": "logits", "compile": False, "recompute": "none"}
ONE, EIGHT, SEVENTY = "llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b"
MIXTURE = "qwen3-30b-a3b"
FB = {"schedule": "1f1b"}
Z1, Z2, Z3 = "optimizer", "gradients", "parameters"
# name, preset, layers, sequence length, the rank, and the plan; the most valuable first
PLANS: tuple[tuple[str, str, int, int, str, dict[str, Any]], ...] = (
    ("fsdp8-1b", ONE, 16, 4096, "first", {"mesh": {"dp_shard": 8}, "sharding": Z3, "micro_batch": 4}),
    ("fsdp8-8b", EIGHT, 8, 4096, "first", {"mesh": {"dp_shard": 8}, "sharding": Z3, "micro_batch": 2}),
    ("fsdp8-8b-compiled", EIGHT, 8, 4096, "first", {"mesh": {"dp_shard": 8}, "sharding": Z3, "micro_batch": 2,
                                                    "compile": True}),
    ("fsdp8-8b-elementwise", EIGHT, 8, 4096, "first", {"mesh": {"dp_shard": 8}, "sharding": Z3, "micro_batch": 2,
                                                       "compile": True, "recompute": "elementwise"}),
    ("fsdp64-70b-full", SEVENTY, 4, 4096, "first", {"mesh": {"dp_shard": 64}, "sharding": Z3, "micro_batch": 2,
                                                    "recompute": "full"}),
    ("zero2-8b", EIGHT, 8, 4096, "first", {"mesh": {"dp_shard": 8}, "sharding": Z2, "micro_batch": 1,
                                           "grad_accum": 2}),
    ("zero1-8b", EIGHT, 8, 4096, "first", {"mesh": {"dp_shard": 8}, "sharding": Z1, "micro_batch": 1,
                                           "grad_accum": 2}),
    ("ddp8-1b", ONE, 16, 4096, "first", {"mesh": {"dp_replicate": 8}, "micro_batch": 4}),
    ("hsdp-8b", EIGHT, 8, 4096, "first", {"mesh": {"dp_replicate": 4, "dp_shard": 8}, "sharding": Z3,
                                          "micro_batch": 2}),
    ("tp2-8b", EIGHT, 8, 4096, "first", {"mesh": {"tp": 2}, "micro_batch": 1}),
    ("tp4-8b", EIGHT, 8, 4096, "first", {"mesh": {"tp": 4}, "micro_batch": 2}),
    ("tp4-8b-compiled", EIGHT, 8, 4096, "first", {"mesh": {"tp": 4}, "micro_batch": 2, "compile": True}),
    ("tp8-70b", SEVENTY, 4, 4096, "first", {"mesh": {"tp": 8}, "micro_batch": 2}),
    ("tp8-70b-regather", SEVENTY, 4, 4096, "first", {"mesh": {"tp": 8}, "micro_batch": 2, "comm": {"regather": True}}),
    ("pp2-8b-first", EIGHT, 8, 4096, "first", {"mesh": {"pp": 2}, "micro_batch": 1, "grad_accum": 4, "pipeline": FB}),
    ("pp2-8b-last", EIGHT, 8, 4096, "last", {"mesh": {"pp": 2}, "micro_batch": 1, "grad_accum": 4, "pipeline": FB}),
    ("pp4-8b-interleaved", EIGHT, 16, 4096, "first", {"mesh": {"pp": 4}, "micro_batch": 1, "grad_accum": 8,
                                                      "pipeline": {"schedule": "interleaved"}}),
    ("pp4-8b-zero-bubble", EIGHT, 16, 4096, "last", {"mesh": {"pp": 4}, "micro_batch": 1, "grad_accum": 8,
                                                     "pipeline": {"schedule": "zero-bubble"}}),
    ("cp2-8b", EIGHT, 4, 16384, "first", {"mesh": {"dp_shard": 4, "cp": 2}, "sharding": Z3, "micro_batch": 1,
                                          "comm": {"context": "gather"}}),
    ("cp4-1b-exchange", ONE, 8, 32768, "first", {"mesh": {"dp_shard": 2, "cp": 4}, "sharding": Z3, "micro_batch": 1,
                                                 "comm": {"context": "exchange"}}),
    ("ep4-30b", MIXTURE, 4, 4096, "first", {"mesh": {"dp_shard": 4, "ep": 4}, "sharding": Z3, "micro_batch": 2}),
    ("ep8-30b-full", MIXTURE, 8, 4096, "first", {"mesh": {"dp_shard": 8, "ep": 8}, "sharding": Z3, "micro_batch": 2,
                                                 "recompute": "full"}),
    ("tp4-fsdp8-70b-full", SEVENTY, 8, 4096, "first", {"mesh": {"dp_shard": 8, "tp": 4}, "sharding": Z3,
                                                       "micro_batch": 2, "recompute": "full"}),
    ("tp8-pp4-70b-first", SEVENTY, 8, 4096, "first", {"mesh": {"tp": 8, "pp": 4}, "micro_batch": 1, "grad_accum": 8,
                                                     "pipeline": FB}),
    ("tp8-pp4-70b-last", SEVENTY, 8, 4096, "last", {"mesh": {"tp": 8, "pp": 4}, "micro_batch": 1, "grad_accum": 8,
                                                     "pipeline": FB}),
    ("pp2-fsdp4-8b", EIGHT, 8, 4096, "first", {"mesh": {"dp_shard": 4, "pp": 2}, "sharding": Z1, "micro_batch": 1,
                                               "grad_accum": 4, "pipeline": FB}),
    ("tp2-cp2-fsdp2-8b", EIGHT, 4, 16384, "first", {"mesh": {"dp_shard": 2, "tp": 2, "cp": 2}, "sharding": Z3,
                                                    "micro_batch": 1, "comm": {"context": "gather"}}),
)  # fmt: skip
TINY_SHAPE = {"hidden": 64, "heads": 8, "kv_heads": 8, "head_dim": 8, "ffn": 128, "vocab": 512, "layers": 8}
TINY_EXPERTS = {"num_experts": 8, "top_k": 2, "ffn": 32}


def settings_of(name: str, *, tiny: bool) -> list[str]:
    """Return the recipe of a plan, as settings."""
    is_decoder = any(name == each[0] for each in PLANS)
    fields = _decoder_fields(name, tiny=tiny) if is_decoder else _vision_fields(name, tiny=tiny)
    return as_settings(fields)


def as_settings(fields: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(each) if isinstance(each, dict | list) else each}" for key, each in fields.items()]


def _vision_fields(name: str, *, tiny: bool) -> dict[str, Any]:
    from benchmarks.vision_plans import vision_settings

    return vision_settings(name, tiny=tiny, images=Path(tempfile.gettempdir()) / f"trimaran-rehearsals-{os.getuid()}")


def _decoder_fields(name: str, *, tiny: bool) -> dict[str, Any]:
    _, preset, layers, seq_len, _, plan = next(each for each in PLANS if each[0] == name)
    plan = DEFAULTS | plan
    dp = plan["mesh"].get("dp_shard", 1) * plan["mesh"].get("dp_replicate", 1)
    batch = dp * plan["micro_batch"] * plan.get("grad_accum", 1)
    cluster = _cluster(plan["mesh"])
    shape: dict[str, Any] = {"layers": layers}
    if tiny:
        shape, seq_len, plan = TINY_SHAPE | {}, 64, plan | {"precision": "fp32", "compile": False}
        shape |= {"experts": TINY_EXPERTS} if preset == MIXTURE else {}
    return {"model.preset": preset, "model.shape": shape, "data.seq_len": seq_len, "train.global_batch": batch,
            "cluster": cluster, "plan": plan, "data.workers": 0}  # fmt: skip


def _cluster(mesh: dict[str, int]) -> str:
    world = 1
    for axis, degree in mesh.items():
        world *= degree if axis != "ep" else 1
    return f"{world}xH200" if world <= 8 else f"{world // 8}x8xH200"


def measure(name: str, *, steps: int, tiny: bool, turn: IO[str] | None) -> dict[str, Any]:
    """Return the line of one plan. Waits for its turn on the device once torch is imported."""
    import torch

    from trimaran.app.plan.rehearse_answer import read_rehearse_request
    from trimaran.core import UserError
    from trimaran.data import cache_folder
    from trimaran.planner.measure.rehearsal import predicted_rank
    from trimaran.train.rehearsal.rehearsed_rank import rehearse_rank

    began, where = time.monotonic(), next((each[4] for each in PLANS if each[0] == name), "first")
    request = read_rehearse_request(None, {}, settings_of(name, tiny=tiny), ranks=where, steps=steps, layers=0)
    (rank,) = request.ranks
    cost = predicted_rank(request.job, request.device_cluster, request.plan, request.pp_rank_of(rank))
    device = torch.device("cpu") if request.is_on_cpu else torch.device("cuda", 0)
    line: dict[str, Any] = {
        "name": name, "plan": str(request.plan), "rank": rank, "torch": torch.__version__,
        "device": "cpu" if request.is_on_cpu else torch.cuda.get_device_name(device),
        "predicted": {"peak_bytes": cost.peak_bytes, "reserved_bytes": cost.reserved_bytes,
                      "compute_seconds": cost.seconds, "memory": cost.memory, "time": cost.time},
    }  # fmt: skip
    if turn is not None:
        fcntl.flock(turn, fcntl.LOCK_EX)
    started = time.monotonic()
    try:
        found = rehearse_rank(request.recipe, request.plan, rank, steps=steps, cache=cache_folder(os.environ),
                              device=device)  # fmt: skip
    except (UserError, RuntimeError) as error:  # an OutOfMemoryError is a RuntimeError
        return line | {"failed": f"{type(error).__name__}: {error}"[:500], "errors": traceback.format_exc()[-3000:]}
    measured = found.as_dict() | {"passes": len(found.passes)}
    if len(request.job.outline.towers) > 1:  # what its rows hold, to predict it again without its images
        line["towers"] = {each.name: [each.positions, each.segment] for each in request.job.outline.towers}
    errors = {"peak": cost.peak_bytes / found.peak_bytes - 1, "compute": cost.seconds / found.step_seconds - 1}
    return line | {"measured": measured, "error": errors, "import_seconds": started - began,
                   "device_seconds": time.monotonic() - started}  # fmt: skip


def with_prediction(line: dict[str, Any]) -> dict[str, Any]:
    """Return the line with what the cost model predicts today for the cluster that the plan is of."""
    from trimaran.app.plan.rehearse_answer import read_rehearse_request
    from trimaran.planner.measure.rehearsal import predicted_rank

    if "measured" not in line:
        return line
    settings = settings_of(line["name"], tiny=False) if "towers" not in line else _settings_without_images(line["name"])
    request = read_rehearse_request(None, {}, settings, ranks="first", steps=1, layers=0)
    job = _with_row_sizes(request.job, line["towers"]) if "towers" in line else request.job
    cost = predicted_rank(job, request.cluster, request.plan, request.pp_rank_of(line["rank"]))
    measured = line["measured"]
    errors = {
        "peak": cost.peak_bytes / measured["peak_bytes"] - 1,
        "compute": cost.seconds / measured["step_seconds"] - 1,
    }
    return line | {"predicted": {"peak_bytes": cost.peak_bytes, "compute_seconds": cost.seconds}, "error": errors}


def _settings_without_images(name: str) -> list[str]:
    from benchmarks.vision_plans import vision_settings

    return as_settings(vision_settings(name, tiny=False, images=None))


def _with_row_sizes(job: Any, towers: dict[str, list[int]]) -> Any:
    """Return the job for rows that hold as many positions in each tower as those that were measured."""
    sizes = ((tower, towers[tower.name]) for tower in job.outline.towers)
    changed = tuple(replace(tower, positions=each[0], segment=each[1]) for tower, each in sizes)
    return replace(job, outline=replace(job.outline, towers=changed))


def start(name: str, folder: Path, arguments: argparse.Namespace) -> subprocess.Popen[str]:
    """Start the process of one plan, with the allocator settings and compile cache of a real rank."""
    from trimaran.app.plan.rehearse_answer import read_rehearse_request
    from trimaran.runs.compile_cache import compile_cache
    from trimaran.runs.rank_environment import worker_environment

    request = read_rehearse_request(None, {}, settings_of(name, tiny=arguments.tiny), ranks="first", steps=1, layers=0)
    own = worker_environment(os.environ, request.plan, on_cpu=arguments.tiny, deterministic=False)
    paths = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    own |= {"OMP_NUM_THREADS": "1" if arguments.tiny else "4", "PYTHONPATH": paths}
    command = [sys.executable, str(Path(__file__).absolute()), "--one", name, "--turn", str(folder / "turn"),
               "--steps", str(arguments.steps), *(["--tiny"] if arguments.tiny else [])]  # fmt: skip
    with (folder / f"{name}.err").open("w") as errors:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
                                env={**os.environ, **compile_cache(os.environ), **own})  # fmt: skip


def measure_all(names: list[str], into: Path, arguments: argparse.Namespace) -> list[str]:
    """Append one line for each plan that started in time; return the names of those that did not."""
    end, queue, running = time.monotonic() + arguments.seconds, [*names], []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "turn").touch()
        while queue or running:
            while queue and len(running) < MAX_STARTED and time.monotonic() < end:
                name = queue.pop(0)
                try:
                    running.append((name, start(name, folder, arguments)))
                except Exception as error:  # of a plan that is refused: the others still run
                    _append(into, {"name": name, "failed": f"{type(error).__name__}: {error}"[:500]})
            if not running:
                break
            name, process = running.pop(0)
            _append(into, _line_of(name, process, folder / f"{name}.err", limit=arguments.limit))
        return queue


def _line_of(name: str, process: subprocess.Popen[str], errors: Path, *, limit: float) -> dict[str, Any]:
    try:
        out, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"name": name, "failed": f"it took more than {limit:.0f} s"}
    lines = out.strip().splitlines()
    if process.returncode == 0 and lines:
        return json.loads(lines[-1])
    last = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()][-20:]
    return {"name": name, "failed": last[-1][:300] if last else f"exit code {process.returncode}", "errors": last}


def _append(into: Path, line: dict[str, Any]) -> None:
    with into.open("a") as file:
        print(json.dumps(line), file=file, flush=True)
    print(_row(line), flush=True)


def _row(line: dict[str, Any]) -> str:
    if "measured" not in line:
        return f"| {line['name']} | {line['failed'].strip().splitlines()[-1][:80]} |" + " |" * 5
    measured, predicted, error = line["measured"], line["predicted"], line["error"]
    peaks = f"{measured['peak_bytes'] / 2**30:.2f} | {predicted['peak_bytes'] / 2**30:.2f} | {error['peak']:+.1%}"
    seconds = f"{1e3 * measured['step_seconds']:.1f} | {1e3 * predicted['compute_seconds']:.1f}"
    return f"| {line['name']} | {peaks} | {seconds} | {error['compute']:+.1%} |"


def table(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table of all plans, and the median and worst error of the predictions."""
    head = ("plan", "peak GiB", "predicted", "error", "compute ms", "predicted", "error")
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *map(_row, lines)]
    done = [line["error"] for line in lines if "error" in line]
    for what in ("peak", "compute") if done else ():
        errors = sorted(abs(each[what]) for each in done)
        rows.append(f"\n{what}: median error {median(errors):.1%}, worst {errors[-1]:.1%} of {len(errors)} plans")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--known", type=Path)
    parser.add_argument("--seconds", type=float, default=440.0)
    parser.add_argument("--limit", type=float, default=150.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    from benchmarks.vision_plans import VISION_PLANS

    if arguments.one:
        with arguments.turn.open() as turn:
            print(json.dumps(measure(arguments.one, steps=arguments.steps, tiny=arguments.tiny, turn=turn)))
        return
    if arguments.table:
        print(table([with_prediction(line) for line in _read(arguments.results)]))
        return
    known = {each["name"] for each in (_read([arguments.known]) if arguments.known else []) if "measured" in each}
    every = [each[0] for each in PLANS] + [each.name for each in VISION_PLANS]
    wanted = set(arguments.only.split(",")) if arguments.only else {*every}
    names = [each for each in every if each in wanted - known]
    (into,) = arguments.results
    left = measure_all(names, into, arguments)
    print(table(_read([into])))
    if left:
        print(f"no time for {', '.join(left)}")


def _read(files: list[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line]


if __name__ == "__main__":
    main()
