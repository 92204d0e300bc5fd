"""`trimaran bench comm` over NCCL: two ranks share one GPU, as tests of NCCL do here."""

import json
import os
import subprocess
import sys

import pytest

from trimaran.machine import BUS_FACTORS

pytestmark = pytest.mark.gpu


def test_nccl_ranks_measure_every_collective() -> None:
    command = [sys.executable, "-m", "trimaran", "bench", "comm", "--backend", "nccl", "--ranks", "2", "--json",
               "--sizes", "1KiB..16MiB", "--seconds", "20", "--dtype", "bf16"]  # fmt: skip
    environment = os.environ | {"TRIMARAN_SHARE_GPUS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    print({each["collective"]: each["fit"] for each in answer["curves"]})
    assert (answer["backend"], answer["wrong"]) == ("nccl", [])
    assert answer["nccl"]
    assert {each["collective"] for each in answer["curves"]} == BUS_FACTORS.keys()
    for curve in answer["curves"]:
        assert all(point["bus_gb_per_second"] > 0 for point in curve["points"])
