"""The predicted bytes and seconds of offload to a disk."""

from dataclasses import replace
from pathlib import Path

import pytest

from trimaran.core import Mesh, Plan
from trimaran.cost import Job, predict_equal
from trimaran.machine import CPU, DEVICES, Calibration, Cluster, DiskRates, apply_calibration, measure_disk
from trimaran.machine.probe import calibrate
from trimaran.models import PRESETS, outline_of

SPEC = PRESETS["llama-3.1-8b"]
JOB = Job(outline=outline_of(SPEC), seq_len=4096)
H200 = Cluster(device=DEVICES["H200"])
PLAN = Plan(precision="bf16", micro_batch=1, loss="fused", compile=True)
COUNT = JOB.outline.trained_parameters


def on_disk(offload: str, **fields: object) -> Plan:
    return Plan.model_validate(PLAN.model_dump() | {"offload": offload, "disk": {"path": "/nvme"}} | fields)


def test_optimizer_states_and_lower_halves_are_on_disk() -> None:
    whole, ours = (predict_equal(JOB, H200, plan) for plan in (PLAN, on_disk("optimizer")))
    assert ours.disk_bytes == pytest.approx(10 * COUNT, rel=0.001)
    assert whole.peak_bytes - ours.peak_bytes == pytest.approx(10 * COUNT, rel=0.05)
    assert ours.host_bytes < 2**30
    assert whole.disk_bytes == 0


def test_parameters_are_on_disk_and_their_gradients_on_the_host() -> None:
    found = predict_equal(JOB, H200, on_disk("parameters", sharding="parameters"))
    assert found.disk_bytes == pytest.approx(12 * COUNT, rel=0.001)
    assert 4 * COUNT < found.host_bytes < 7 * COUNT


def test_ranks_of_a_node_share_its_disk() -> None:
    plan = on_disk("parameters", sharding="parameters", mesh=Mesh(dp_shard=8))
    eight = replace(H200, devices_per_node=8)
    found, slower = (
        predict_equal(JOB, replace(eight, disk=disk), plan)
        for disk in (DiskRates(), DiskRates(read=3e9, both=1.2e9))
    )  # fmt: skip
    assert found.disk_bytes == pytest.approx(12 * COUNT, rel=0.001)
    assert slower.time["offload"] == pytest.approx(2 * found.time["offload"], rel=0.1)


def test_the_time_is_that_of_the_disk() -> None:
    found = predict_equal(JOB, replace(H200, disk=DiskRates(both=2e9)), on_disk("optimizer"))
    assert found.time["offload"] == pytest.approx(10 * COUNT / 2e9, rel=0.05)


def test_a_cpu_rank_holds_the_buffers_and_not_the_states() -> None:
    cpu = Cluster(device=CPU)
    plan = PLAN.model_copy(update={"precision": "fp32", "compile": False})
    small = Job(outline=outline_of(PRESETS["llama-3.2-1b"]), seq_len=64)
    whole, ours = (
        predict_equal(small, cpu, each)
        for each in (plan, Plan.model_validate({**plan.model_dump(), "offload": "optimizer", "disk": {"path": "/d"}}))
    )
    assert whole.peak_bytes - ours.peak_bytes == pytest.approx(8 * small.outline.trained_parameters, rel=0.1)


def test_measured_rates_replace_the_assumed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "FILE_BYTES", 1 << 24)
    measured = measure_disk(tmp_path, seconds=0.03)
    assert all(0 < rate < 1e3 for rate in measured.values())
    assert [*tmp_path.iterdir()] == []
    cluster = apply_calibration(H200, Calibration.model_validate({"disk": measured}))
    assert cluster.disk == DiskRates(
        read=measured["read_gb_per_second"] * 1e9, both=measured["both_gb_per_second"] * 1e9
    )
    assert cluster.device == H200.device
