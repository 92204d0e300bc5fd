"""Peak memory and step time of our trainer on this machine's GPU, to compare the planner's predictions with.

usage: python benchmarks/planner.py RESULTS.jsonl [--known RESULTS.jsonl] [--seconds 240] [--only NAME,..]
                                    [--held-out | --small] [--fill]

Each configuration runs in its own process and writes one line. Those in `--known` are skipped, and none starts after
`--seconds`; the most valuable come first. The plan is given in full, so no measurement depends on a prediction.
`--small` measures models of 25M to 360M parameters, whose steps may be shorter than their host's work. `--fill`
measures nothing: it compiles for all configurations, several at a time, with models of one layer, to fill the compile
cache. `python -m benchmarks.memory RESULTS.jsonl` makes the memory tables from these rows, and `make accuracy` compares
the cost model with them.
"""

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).absolute().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # instead of this folder, whose file names shadow libraries
NUM_STEPS, NUM_WARMUP_STEPS = 14, 7  # CUDA graphs are captured in the fourth step
FILL = "fill"
MAX_COMPILING = 6  # processes
MAX_STARTED = 3  # processes; the next ones import while one uses the device
DEFAULTS: dict[str, Any] = {
    "shape": {},
    "grad_accum": 1,
    "recompute": "none",
    "loss": "fused",
    "compile": True,
    "cuda_graphs": True,
    "precision": "bf16",
    "offload": "none",
    "sharding": "none",
    "states": "fp32",
}
# These shapes have an untied head; the presets of 1B and 3B tie it to the embedding.
ONE, THREE, EIGHT = "1b", "3b", "8b"
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    ONE: ("llama-3.2-1b", {"tied": False}),
    THREE: ("llama-3.2-3b", {"tied": False}),
    EIGHT: ("llama-3.1-8b", {}),
}
# Those of the small contests in `benchmarks/peers/work.py`.
SMALL_SHAPES = {
    "25m": (8, 256, 4, 704),
    "60m": (8, 512, 8, 1376),
    "160m": (12, 768, 12, 2048),
    "360m": (24, 1024, 16, 2816),
}
SHAPES |= {
    name: ("tiny", {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": heads, "head_dim": hidden // heads, "ffn": ffn,
        "vocab": 32_000, "tied": False,
    })
    for name, (layers, hidden, heads, ffn) in SMALL_SHAPES.items()
}  # fmt: skip
# shape or preset, sequence length, micro-batch, changes of the defaults; most valuable first
CONFIGURATIONS: tuple[tuple[str, int, int, dict[str, Any]], ...] = (
    (ONE, 4096, 4, {}),
    (EIGHT, 4096, 2, {"recompute": 8}),  # the planner's choice
    (THREE, 4096, 4, {}),
    (THREE, 4096, 4, {"precision": "fp8"}),
    (EIGHT, 4096, 2, {}),  # how slow is a nearly full device?
    (ONE, 4096, 4, {"loss": "chunked"}),
    (ONE, 4096, 4, {"states": "8bit"}),
    (ONE, 4096, 4, {"recompute": "full", "loss": "chunked"}),
    (ONE, 4096, 4, {"recompute": "selective"}),
    (ONE, 4096, 4, {"states": "bf16"}),
    (ONE, 4096, 4, {"loss": "logits"}),
    (EIGHT, 4096, 4, {"recompute": "full"}),
    (ONE, 4096, 4, {"offload": "optimizer"}),
    (THREE, 4096, 4, {"recompute": "full", "loss": "chunked", "states": "8bit"}),
    (ONE, 4096, 4, {"compile": False}),
    (EIGHT, 4096, 4, {"recompute": 2, "loss": "chunked", "states": "8bit"}),
    (ONE, 4096, 2, {"grad_accum": 4}),
    (ONE, 1024, 1, {}),
    (THREE, 4096, 4, {"recompute": 2}),
    (ONE, 4096, 4, {"precision": "fp8"}),
    (ONE, 32768, 1, {"recompute": "full"}),
    (EIGHT, 4096, 1, {"precision": "fp8"}),
    ("llama-3.2-1b", 4096, 4, {}),
    (ONE, 4096, 4, {"offload": "activations"}),
    (THREE, 4096, 4, {"recompute": "selective", "states": "bf16"}),
    (ONE, 4096, 4, {"offload": "parameters", "sharding": "parameters"}),
    ("qwen3-0.6b", 4096, 4, {}),
    ("qwen3-30b-a3b", 2048, 4, {"shape": {"layers": 4}}),
    (ONE, 1024, 4, {"precision": "fp32", "compile": False}),
)
# Configurations that no constant was fitted to (`--held-out`).
HELD_OUT: tuple[tuple[str, int, int, dict[str, Any]], ...] = (
    (THREE, 4096, 2, {"recompute": "selective"}),
    (ONE, 2048, 8, {"loss": "chunked"}),
    (EIGHT, 8192, 1, {"recompute": 3}),
    ("qwen3-1.7b", 4096, 2, {}),
    (THREE, 8192, 2, {"precision": "fp8", "recompute": 2}),
    (ONE, 1024, 8, {"grad_accum": 2, "compile": False}),
)
# Small models (`--small`): what a step costs where the host or single launches are the limit.
SMALL: tuple[tuple[str, int, int, dict[str, Any]], ...] = (
    *((name, 1024, 16, {}) for name in SMALL_SHAPES),
    *((name, 1024, 16, {"cuda_graphs": False}) for name in SMALL_SHAPES),
    *((name, 1024, 16, {"compile": False}) for name in SMALL_SHAPES),
    ("25m", 1024, 16, {"compile": False, "cuda_graphs": False}),
    ("160m", 1024, 16, {"compile": False, "cuda_graphs": False}),
    ("25m", 1024, 2, {"grad_accum": 8}),
    ("160m", 1024, 2, {"grad_accum": 8, "cuda_graphs": False}),
    ("160m", 1024, 16, {"grad_accum": 8}),
    ("160m", 2048, 8, {}),
    ("60m", 512, 32, {}),
)
SETS = {"": CONFIGURATIONS, "held-out": HELD_OUT, "small": SMALL}


def configurations(which: str = "") -> dict[str, dict[str, Any]]:
    """Return the configurations of one set in full, by name."""
    found = {}
    for model, seq_len, micro_batch, changes in SETS[which]:
        preset, shape = SHAPES.get(model, (model, {}))
        parts = [f"{key}={json.dumps(value)}" if key == "shape" else f"{key}={value}" for key, value in changes.items()]
        name = " ".join([model, f"{micro_batch}x{seq_len}", *parts])
        found[name] = {"name": name, "preset": preset, "seq_len": seq_len, "micro_batch": micro_batch}
        found[name] |= DEFAULTS | {"shape": shape} | changes
    return found


def plan_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return the plan fields for one device."""
    fields = ("micro_batch", "grad_accum", "precision", "recompute", "loss", "offload", "sharding", "compile")
    return {field: config[field] for field in (*fields, "cuda_graphs")}


def train(config: dict[str, Any], turn: IO[str]) -> dict[str, Any]:
    """Train a few steps while holding the lock `turn`, which the process keeps to its end; return the measurements."""
    # The parent must not touch the device, so only children import torch, before they get the lock.
    import torch  # noqa: PLC0415
    from benchmarks.peers.ours import trainer  # noqa: PLC0415

    from trimaran.core import Plan, Recipe  # noqa: PLC0415

    run_steps = trainer()
    is_filling = Path(turn.name).name == FILL
    recipe = Recipe.model_validate(
        {
            "model": {"preset": config["preset"], "shape": config["shape"] | ({"layers": 1} if is_filling else {})},
            "data": {"seq_len": config["seq_len"]},
            "train": {
                "steps": 2 if is_filling else NUM_STEPS,
                "global_batch": config["micro_batch"] * config["grad_accum"],
                "save": False,
                "sample": {"tokens": 0},
                "evaluate": {"batches": 0},
                "optimizer": {"states": config["states"]},
            },
        }
    )
    if not is_filling:
        fcntl.flock(turn, fcntl.LOCK_EX)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        run_steps(path, recipe, Plan(**plan_fields(config)))
        if is_filling:
            return config | {"whole_seconds": round(time.monotonic() - began, 1)}
        steps = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()][NUM_WARMUP_STEPS:]
    seconds = statistics.median(step["step_seconds"] for step in steps)
    slowest, fastest = (extreme(step["step_seconds"] for step in steps) for extreme in (max, min))
    return config | {
        "peak_bytes": steps[-1]["peak_bytes"],
        **(gpu_bytes() if torch.cuda.is_available() else {}),
        "step_seconds": round(seconds, 5),
        "spread": round((slowest - fastest) / seconds, 3),
        "tokens_per_second": round(config["micro_batch"] * config["grad_accum"] * config["seq_len"] / seconds, 1),
        "phases": {
            phase: round(statistics.median(step["phases"][phase] for step in steps), 5) for phase in steps[0]["phases"]
        },
        "torch": torch.__version__,
        "whole_seconds": round(time.monotonic() - began, 1),
    }


def gpu_bytes() -> dict[str, Any]:
    """Return what the allocator reserved, and what lies outside it: the CUDA context and others."""
    import torch  # noqa: PLC0415

    free, total = torch.cuda.mem_get_info()
    return {
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "outside_bytes": total - free - torch.cuda.memory_reserved(),
        "device": torch.cuda.get_device_name(),
    }


def start(name: str, config: dict[str, Any], turn: Path) -> subprocess.Popen[str]:
    """Start the process of one configuration, with the environment that the launcher would set."""
    steady = config["recompute"] == "none" and config["offload"] == "none"
    outer = {**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    allocator = {} if steady else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, __file__, "--one", name, str(turn)]
    return subprocess.Popen(command, env=outer | allocator, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def measure_all(todo: dict[str, dict[str, Any]], into: Path, *, seconds: float, fill: bool) -> None:
    """Append a line to `into` for each configuration that started in time."""
    end, names, running = time.monotonic() + seconds, list(todo), []
    with tempfile.TemporaryDirectory() as folder:
        turn, together = (Path(folder) / FILL, MAX_COMPILING) if fill else (Path(folder) / "turn", MAX_STARTED)
        while names or running:
            while names and len(running) < together and time.monotonic() < end:
                name = names.pop(0)
                running.append((name, start(name, todo[name], turn)))
            if not running:
                break
            name, process = running.pop(0)
            out, err = process.communicate()
            lines = out.strip().splitlines()
            result = lines[-1] if process.returncode == 0 and lines else json.dumps(todo[name] | {"failed": err[-600:]})
            with into.open("a") as file:
                print(result, file=file, flush=True)
            brief = json.loads(result)
            print(name, {key: brief.get(key) for key in ("peak_bytes", "reserved_bytes", "outside_bytes",
                  "step_seconds", "spread", "whole_seconds", "failed")}, flush=True)  # fmt: skip
    print(len(names), "left")


def main() -> None:
    if sys.argv[1] == "--one":
        name, turn = sys.argv[2:]
        lock = Path(turn).open("w")  # noqa: SIM115 - held until the device memory is free
        try:
            known = {found: config for which in SETS for found, config in configurations(which).items()}
            print(json.dumps(train(known[name], lock)), flush=True)
        except Exception:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("into", type=Path)
    parser.add_argument("--known", type=Path)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--only", default="")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--held-out", action="store_const", const="held-out", dest="which", default="")
    which.add_argument("--small", action="store_const", const="small", dest="which")
    parser.add_argument("--fill", action="store_true")
    options = parser.parse_args()
    lines = options.known.read_text().splitlines() if options.known and options.known.is_file() else []
    known = {json.loads(line)["name"] for line in lines if "peak_bytes" in json.loads(line)}
    open_ones = configurations(options.which)
    wanted = set(options.only.split(",")) if options.only else set(open_ones)
    todo = {name: config for name, config in open_ones.items() if name in wanted - known}
    measure_all(todo, options.into, seconds=options.seconds, fill=options.fill)


if __name__ == "__main__":
    main()
