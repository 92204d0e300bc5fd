"""The doctor on a machine with a GPU: its checks pass, and the checks before a run are fast."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.environment import environment
from trimaran.app import refuse_unfit_machine, resolve
from trimaran.machine import (
    FULL_QUERY,
    PEER_MATRIX,
    SHORT_QUERY,
    TOPOLOGY_MATRIX,
    parse_full_query,
    parse_peers,
    parse_short_query,
    parse_topology,
    run_driver_tool,
)

pytestmark = pytest.mark.gpu


def test_a_healthy_gpu_passes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trimaran", "doctor", "--json", "--set", "train.steps=2"]
    start = time.monotonic()
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout, f"{time.monotonic() - start:.1f} s")
    found = {each["code"]: each for each in json.loads(done.stdout)["checks"]}
    looked = ("H001", "H002", "H003", "H004", "H014", "H015")
    assert {found[code]["status"] for code in looked} <= {"pass", "warn"}
    assert found["H015"]["evidence"]["rates"]["GPU 0"] > 1e13
    assert "driver" in found["H001"]["evidence"]


def test_the_drivers_output_is_parsed() -> None:
    gpus, driver = parse_full_query(run_driver_tool(FULL_QUERY))
    assert driver
    assert gpus
    assert all(gpu.memory > 2**30 and gpu.uuid.startswith("GPU-") and gpu.clocks for gpu in gpus)
    assert all(gpu.clocks.power_limit and gpu.clocks.max_pcie_width for gpu in gpus if gpu.clocks)
    short, same = parse_short_query(run_driver_tool(SHORT_QUERY))
    assert (same, [(gpu.uuid, gpu.bus) for gpu in short]) == (driver, [(gpu.uuid, gpu.bus) for gpu in gpus])
    ways, peers = parse_topology(run_driver_tool(TOPOLOGY_MATRIX)), parse_peers(run_driver_tool(PEER_MATRIX))
    assert ways is not None
    assert len(ways) == len(peers) == len(gpus)


def test_the_checks_before_a_run_are_fast() -> None:
    request = resolve(None, [])
    assert request.cluster.device.kind == "cuda", os.environ.get("CUDA_VISIBLE_DEVICES")
    refuse_unfit_machine(request)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        refuse_unfit_machine(request)
        best = min(best, time.perf_counter() - start)
    print(f"{best:.3f} s")
    assert best < 0.2
