"""A GPU is measured in under a minute, and its rates are plausible for its model."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trimaran.machine import Calibration, detect

pytestmark = [pytest.mark.gpu, pytest.mark.whole_gpu]


def test_a_gpu_is_measured_in_under_a_minute(tmp_path: Path) -> None:
    environment = os.environ | {"TRIMARAN_CACHE": str(tmp_path)}
    began = time.monotonic()
    command = [sys.executable, "-m", "trimaran", "bench", "calibrate", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < 60
    calibration = Calibration.model_validate(json.loads(done.stdout)["calibration"])
    print(calibration.model_dump_json(indent=2, exclude_none=True))

    data_sheet = detect(visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES")).device
    measured = detect(
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"), calibrations=tmp_path / "calibration"
    ).device
    # No matmul is faster than the data sheet, and a large one on a healthy device reaches half of it.
    for precision in data_sheet.peak_flops:
        assert 0.5 < measured.achievable_flops(precision) / data_sheet.peak(precision) < 1.02, precision
    assert 0.6 < measured.stream_bandwidth / data_sheet.memory_bandwidth < 1.02
    assert 0.2 < measured.pcie_bandwidth / data_sheet.pcie_bandwidth < 1.02
    assert calibration.launch_us is not None
    assert 0.5 < calibration.launch_us < 50
    assert "measured on" in measured.note
