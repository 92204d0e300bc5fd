"""Calibration: the file, a cluster with measured rates, and a real measurement of this CPU."""

import json
import logging
import time
from pathlib import Path

import pytest

from trimaran.app import main
from trimaran.core import UserError
from trimaran.machine import (
    DEVICES,
    Calibration,
    Cluster,
    apply_calibration,
    calibration_folder,
    detect,
    machine_name,
    parse_cluster,
    read_calibration,
)

MEASURED = {
    "device": "H100",
    "date": "2026-07-01",
    "bf16_tflops": 700,
    "fp8_tflops": 1200,
    "memory_gb_per_second": 2900,
    "pcie_gb_per_second": 55,
    "host_gb_per_second": 350,
    "collectives": {"devices": 8, "latency_us": 4, "all_reduce_gb_per_second": 360, "send_gb_per_second": 300},
}


def test_measured_rates_replace_those_of_the_catalogue() -> None:
    cluster = apply_calibration(parse_cluster("2x8xH100"), Calibration.model_validate(MEASURED))
    device = cluster.device
    assert device.achievable_flops("bf16") == 700e12
    assert device.achievable_flops("fp8") == 1200e12
    assert device.achievable_flops("fp32") == DEVICES["H100"].achievable_flops("fp32")  # not measured
    assert device.peak("bf16") == DEVICES["H100"].peak("bf16")  # the data sheet stays, for mfu
    assert device.stream_bandwidth == 2900e9
    assert device.pcie_bandwidth == 55e9
    assert cluster.host_bandwidth == 350e9
    assert "measured on 2026-07-01" in device.note
    node, network = cluster.levels
    assert node.reached == {"all_reduce": 360e9, "send": 300e9}
    assert (node.name, node.devices, node.latency) == ("NVLink", 8, pytest.approx(4e-6))
    assert not network.reached


def test_cpu_ranks_share_what_was_measured_on_all_cores() -> None:
    calibration = Calibration(fp32_tflops=0.2, memory_gb_per_second=20)
    two, four = (apply_calibration(Cluster(device=DEVICES["cpu"], devices_per_node=n), calibration) for n in (2, 4))
    assert two.device.achievable_flops("fp32") == two.device.peak("fp32") == pytest.approx(0.1e12)
    assert four.device.achievable_flops("fp32") == pytest.approx(0.05e12)
    assert four.device.stream_bandwidth == pytest.approx(5e9)


def test_a_cluster_file_names_a_calibration_or_holds_one(tmp_path: Path) -> None:
    (tmp_path / "node.json").write_text(json.dumps(MEASURED))
    for text in ("calibration: node.json", f"calibration: {json.dumps(MEASURED)}"):
        file = tmp_path / "ours.yaml"
        file.write_text(f"device: H100\n{text}\n")
        assert parse_cluster(str(file)).device.achievable_flops("bf16") == 700e12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a mapping"),
        ('{"bf16_tflops": 700', "not a mapping"),
        ("[" * 100_000, "not a mapping"),
        ("\xff", "not a mapping"),
        ('{"bf16_tflop": 700}', "did you mean 'bf16_tflops'?"),
        ('{"bf16_tflops": -1}', "bf16_tflops: Input should be greater than 0"),
        ('{"bf16_tflops": NaN}', "bf16_tflops"),
        ('{"collectives": {"devices": 8, "latency": 3}}', "collectives.latency"),
        ('{"shapes": {"bf16": "fast"}}', "shapes.bf16"),
    ],
)
def test_an_invalid_calibration_is_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "node.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match="C006") as caught:
        read_calibration(file)
    assert message in caught.value.what


def test_a_missing_calibration_is_one_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text("{device: H100, calibration: gone.json}")
    with pytest.raises(UserError, match="C006: the calibration cannot be read"):
        parse_cluster(str(file))


def test_a_broken_file_in_the_cache_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / f"{machine_name(parse_cluster('2xcpu'))}.json").write_text("{broken")
    with caplog.at_level(logging.WARNING):
        cluster = parse_cluster("2xcpu", calibrations=tmp_path)
    assert "quick estimate" in cluster.device.note
    assert "ignored" in caplog.text


def test_the_calibration_folder_follows_the_environment() -> None:
    assert calibration_folder({"TRIMARAN_CACHE": "/c"}) == Path("/c/calibration")
    assert calibration_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/trimaran/calibration")


@pytest.mark.slow  # it measures for half a minute
def test_this_machine_is_measured_and_the_planner_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIMARAN_CACHE", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    began = time.monotonic()
    assert main(["bench", "calibrate", "--seconds", "1.5", "--json"]) == 0
    assert time.monotonic() - began < 60
    answer = json.loads(capsys.readouterr().out)
    path = Path(answer["path"])
    assert path.parent == tmp_path / "calibration"
    calibration = read_calibration(path)
    assert calibration.model_dump(exclude_none=True) == answer["calibration"]
    assert calibration.fp32_tflops is not None
    assert 1e-3 < calibration.fp32_tflops < 100
    assert calibration.fp32_tflops == max(
        rate for shape, rate in calibration.shapes.items() if shape.startswith("fp32")
    )
    assert calibration.memory_gb_per_second
    assert calibration.host_gb_per_second
    assert calibration.launch_us
    assert calibration.collectives is not None
    assert calibration.collectives.devices >= 2
    assert calibration.collectives.latency_us > 1  # no process reaches another in less

    here = detect(visible_devices="", calibrations=path.parent)
    assert here.device.achievable_flops("fp32") == pytest.approx(calibration.fp32_tflops * 1e12 / here.devices_per_node)
    assert main(["plan", "--set", "cluster=2xcpu", "--json"]) == 0
    prediction = json.loads(capsys.readouterr().out)["prediction"]
    assert f"measured on {calibration.date}" in prediction["source"]
    assert prediction["device_peak_flops"] == pytest.approx(calibration.fp32_tflops * 1e12 / 2)


def test_an_unwritable_path_is_an_error_before_measuring(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.process_time()
    assert main(["bench", "calibrate", "--output", "/proc/nowhere/here.json"]) == 2
    assert "C009" in capsys.readouterr().err
    assert time.process_time() - began < 5


def test_a_rate_above_the_data_sheet_is_refused() -> None:
    cluster = parse_cluster("8xH100")
    assert apply_calibration(cluster, Calibration(bf16_tflops=1000.0)).device.reached["bf16"] == 1e15
    with pytest.raises(UserError, match="C006") as caught:
        apply_calibration(cluster, Calibration(bf16_tflops=99_999.0))
    assert "989" in caught.value.what
