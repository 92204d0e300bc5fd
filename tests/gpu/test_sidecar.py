"""NVML samples of a GPU, and the samples of a run on one."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.environment import environment
from tests.fault.harness import lines
from trimaran.machine import GpuSampler
from trimaran.runs import RunDirectory

pytestmark = pytest.mark.gpu
pytest.importorskip("pynvml", reason="GPUs are sampled with the extra `metrics`")


def test_sampling_a_gpu_is_fast() -> None:
    gpus = GpuSampler(os.environ.get("CUDA_VISIBLE_DEVICES"))
    held = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    gpus.sample()
    began = time.monotonic()
    first, *_ = found = gpus.sample()
    took = time.monotonic() - began
    print(f"{took * 1000:.1f} ms for {len(found)} GPUs: {first}")
    known = torch.cuda.get_device_properties(0)
    assert len(found) == torch.cuda.device_count()
    assert str(known.uuid) in first["uuid"]
    assert first["memory"] == pytest.approx(known.total_memory, rel=0.05)
    assert held.numel() < first["memory_used"] <= first["memory"]
    assert 0 <= first["utilisation"] <= 1
    assert 10 < first["temperature"] < 110
    assert 0 < first["power"] < 1.5 * first["power_limit"]
    assert 0 < first["sm_clock"] <= first["sm_clock_max"]
    assert isinstance(first["throttle"], list)
    assert first["power_limit_default"] > 0
    assert first.get("ecc_uncorrected", 0) >= 0  # a GeForce has no ECC
    assert took < 0.5
    gpus.close()


def test_a_run_on_a_gpu_is_sampled_while_it_trains(tmp_path: Path) -> None:
    settings = ["train.steps=400", "cluster=auto", "plan.compile=false", "telemetry.sample_seconds=0.5"]
    command = [sys.executable, "-m", "trimaran", "train", "--run-dir", str(tmp_path / "run")]
    for setting in settings:
        command += ["--set", setting]
    subprocess.run(command, check=True, timeout=300, capture_output=True, env=environment())
    samples = lines(RunDirectory(tmp_path / "run").samples(0))
    busy = [gpu for sample in samples for gpu in sample["gpus"][:1] if sample["ranks"]]
    assert busy
    assert max(gpu["utilisation"] for gpu in busy) > 0.1
    assert max(gpu["memory_used"] for gpu in busy) > 200 << 20
    assert not [each for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in (each.info["cmdline"] or [])]
