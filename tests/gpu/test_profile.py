"""Profiles on a GPU: kernels in traces, the allocator's history in memory snapshots, and snapshots on OOM."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trimaran.core import Plan, Recipe
from trimaran.runs import (
    ProfileRequest,
    RunDirectory,
    create_run,
    device_phases,
    find_traces,
    load_trace,
    merge,
    snapshot_file,
    summarise,
    write_request,
)

pytestmark = pytest.mark.gpu

# The third step asks for more memory than there is, which only the allocator itself can refuse.
GREEDY = """
import os, sys, torch
from pathlib import Path
from trimaran.data import cache_folder
from trimaran.runs import open_run
from trimaran.train.process.rank_setup import read_rank_info
from trimaran.train.steppers.stepper import PlainStepper
from trimaran.train.worker import run_worker

step, calls = PlainStepper.step, []

def greedy(self, *args, **more):
    calls.append(1)
    if len(calls) == 3:
        torch.empty(10**13, dtype=torch.uint8, device="cuda")
    return step(self, *args, **more)

PlainStepper.step = greedy
sys.exit(run_worker(open_run(Path(sys.argv[1])), read_rank_info(os.environ), cache=cache_folder(os.environ)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile")


def new(folder: Path, name: str, *, compiled: bool = False, **telemetry: Any) -> RunDirectory:
    train = {"steps": 10, "global_batch": 8, "save": False, "sample": {"tokens": 0}, "evaluate": {"batches": 0}}
    recipe = Recipe.model_validate({"train": train, "telemetry": telemetry})
    return create_run(folder / name, recipe, Plan(micro_batch=8, precision="bf16", compile=compiled))


def train(run: RunDirectory, *command: str) -> int:
    here = {"RANK": "0", "WORLD_SIZE": "1", "TRIMARAN_CACHE": str(run.path.parent / "cache")}
    started = [sys.executable, *(command or ("-m", "trimaran.train")), str(run.path)]
    return subprocess.run(started, env=os.environ | here, timeout=300).returncode


def lines(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_trace_has_kernels_with_phases_and_does_not_change_training(folder: Path, compiled: bool) -> None:
    plain, traced = (new(folder, f"{each}-{compiled}", compiled=compiled, profile=each) for each in ("", "4:7"))
    assert train(plain) == train(traced) == 0, traced.log(0).read_text()
    assert [line["loss"] for line in lines(traced)] == pytest.approx([line["loss"] for line in lines(plain)], rel=1e-2)
    trace = load_trace(find_traces(traced)[4][0])
    found = summarise(trace)
    assert found.on_device
    assert (found.steps, found.communication) == ((4, 6), 0.0)
    assert 0 <= found.idle < found.seconds
    assert sum(row.seconds for row in found.rows) <= 1.05 * found.seconds
    assert {(phase, step) for _, _, phase, step in device_phases(trace)} >= {
        (phase, step) for phase in ("forward", "backward", "optimizer") for step in (4, 5, 6)
    }
    tracks = {e["args"]["name"] for e in merge([trace])["traceEvents"] if e["name"] == "thread_name"}
    assert any(name.startswith("GPU 0 stream") for name in tracks)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_memory_snapshot_has_the_peak_and_the_source_lines_behind_it(folder: Path, compiled: bool) -> None:
    run = new(folder, f"memory-{compiled}", compiled=compiled)
    write_request(run, ProfileRequest(steps=1, memory=True))
    assert train(run) == 0, run.log(0).read_text()
    (path,) = run.profiles.glob("memory-*.json")
    tree = json.loads(path.read_text())
    assert tree["reserved"] >= tree["allocated"] > tree["kinds"]["parameters"] > 0
    assert tree["kinds"]["states"] >= tree["kinds"]["parameters"]
    assert tree["peak"]["allocated"] > tree["allocated"]
    assert any(row["file"].endswith(".py") for row in tree["peak"]["lines"])
    assert len(tree["timeline"]) > 10
    assert "gradients" in tree["within"]["kinds"]
    assert [line.get("recompiles", 0) for line in lines(run)[2:]] == [0] * 8


@pytest.mark.parametrize("history", [False, True])
def test_an_out_of_memory_error_writes_a_snapshot_of_that_moment(folder: Path, history: bool) -> None:
    run = new(folder, f"oom-{history}", memory_snapshots=history)
    assert train(run, "-c", GREEDY) == 1
    tree = json.loads(snapshot_file(run, step=3, rank=0).read_text())
    assert tree["oom"]["wanted"] >= 10**13
    assert {row["kind"] for row in tree["holders"]} >= {"parameters", "states"}
    assert bool(tree["timeline"]) == history
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    assert [each["data"]["request"] for each in events if each["kind"] == "profile"] == ["oom"]
    assert events[-1]["data"]["type"] == "OutOfMemoryError"
