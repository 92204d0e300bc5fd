"""Rules about hardware: on recorded samples of a real H200, which was healthy and at its power limit, and on swapping.

A machine that really swaps is in `tests/fault/test_diagnosis_swap.py`.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.prometheus_server import alerts
from tests.runs import finished_run
from trimaran.app import RunState, status_lines
from trimaran.core import Finding, Mesh, Plan, parse_recipe
from trimaran.doctor import RULES, Evidence, read_planner_inputs, swap, usable_bytes
from trimaran.machine import HARDWARE_THROTTLE_REASONS, GpuSampler
from trimaran.runs import append_line

MIB = 2**20
LINES = (Path(__file__).parent / "machines" / "h200-samples.jsonl").read_text().splitlines()
SAMPLES: list[dict[str, Any]] = [json.loads(line) for line in LINES]
NAME = "GPU 0 of vm"
UUID = "GPU-00000000-1111-2222-3333-444444444444"


def evidence_of(samples: list[dict[str, Any]], steps: Sequence[dict[str, Any]] = ()) -> Evidence:
    """Return the evidence of these samples and steps of a 1B model."""
    settings = ["cluster=1xH200", "model.preset=llama-3.2-1b", "data.seq_len=4096", "train.global_batch=4"]
    recipe = parse_recipe("", name="test", overrides=settings)
    plan = Plan(micro_batch=4, precision="bf16", compile=True, loss="fused")
    return Evidence(
        recipe=recipe,
        plan=plan,
        samples=tuple(samples),
        steps=tuple(steps),
        planner_inputs=cache(lambda: read_planner_inputs(recipe, plan)),
    )


def health_findings(samples: list[dict[str, Any]], steps: Sequence[dict[str, Any]] = ()) -> list[Finding]:
    """Return the findings about health, not speed, for these samples and steps of a 1B model."""
    evidence = evidence_of(samples, steps)
    return [each for rule in RULES for each in rule(evidence) if each.code >= "F050"]


def with_gpu(change: Callable[[dict[str, Any]], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the samples with changed GPU values while it trained."""
    return [
        each | {"gpus": [gpu | change(gpu) if gpu["utilisation"] > 0.5 else gpu for gpu in each["gpus"]]}
        for each in SAMPLES
    ]


def test_a_gpu_at_its_power_limit_is_healthy() -> None:
    limited = [gpu for each in SAMPLES for gpu in each["gpus"] if "power_cap" in gpu["throttle"]]
    assert len(limited) > 15
    assert min(gpu["sm_clock"] / gpu["sm_clock_max"] for gpu in limited) < 0.7  # its clock does go down
    assert health_findings(SAMPLES) == []
    for seconds in range(1, 10):  # nor with fewer samples
        assert health_findings(SAMPLES[::seconds]) == []


def test_neither_watch_nor_the_alert_reports_the_power_limit_as_a_fault(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    busy = next(each for each in SAMPLES if each["gpus"][0]["power"] > 690)
    append_line(run.samples(0), busy)
    state = RunState(run)
    state.refresh()
    (line,) = [each for each in status_lines(state) if each.plain.startswith("gpu ")]
    assert line.plain == "gpu       busy 100%, memory 26%, 694 W, 57 °C, at the power limit"
    (pattern,) = re.findall(r'reason=~"([^"]+)"', alerts()["TrimaranGpuThrottled"]["expr"])
    reasons = {why for each in SAMPLES for gpu in each["gpus"] for why in gpu["throttle"]}
    assert reasons == {"power_cap"}
    assert [why for why in reasons if re.fullmatch(pattern, why)] == []


@pytest.mark.parametrize("reason", HARDWARE_THROTTLE_REASONS)
def test_a_gpu_throttled_by_a_fault_is_reported(reason: str) -> None:
    (found,) = health_findings(with_gpu(lambda gpu: {"throttle": ["power_cap", reason], "sm_clock": 990_000_000}))
    assert (found.code, found.culprit, found.severity) == ("F069", NAME, "warning")
    assert found.evidence["reasons"] == [reason]
    assert reason.replace("_", " ") in found.verdict


def test_a_locked_clock_is_reported_with_the_command_that_resets_it() -> None:
    """A user locked the clock or set application clocks; NVML reports only the second reliably."""
    for throttle in ([], ["application_clocks"]):
        locked = with_gpu(lambda gpu, why=throttle: {"sm_clock": 345_000_000, "power": 160.0, "throttle": why})
        (found,) = health_findings(locked)
        assert (found.code, found.culprit) == ("F069", NAME)
        assert found.verdict == (
            f"{NAME} runs at 17% of its highest clock under load, limited by a clock setting: it draws 160 W of 700 W"
        )
        assert f"`nvidia-smi -i {UUID} -rgc`" in found.fix
        assert found.gain == pytest.approx(0.83, abs=0.01)
    assert health_findings(with_gpu(lambda gpu: {"sm_clock": 345_000_000, "power": 160.0, "utilisation": 0.6})) == []


def test_a_lowered_power_limit_is_reported_with_the_command_that_raises_it() -> None:
    low = {"sm_clock": 800_000_000, "power": 200.0, "power_limit": 200.0, "throttle": ["power_cap"]}
    (found,) = health_findings(with_gpu(lambda gpu: low | {"power_limit_default": 700.0}))
    assert found.verdict.endswith("of its highest clock under load, because its power limit is 200 W (default 700 W)")
    assert found.fix.endswith(f"`nvidia-smi -i {UUID} -pl 700`")
    assert health_findings(with_gpu(lambda gpu: low)) == []  # without the default limit there is nothing to compare
    mild = {"power_limit": 600.0, "power_limit_default": 700.0}
    assert health_findings(with_gpu(lambda gpu: mild)) == []  # a limit that costs little is the user's choice


def test_a_device_filled_by_another_process_is_reported() -> None:
    """The recorded run had 34 GiB reserved and 33 GiB in tensors; another process takes 103 GiB."""
    memory = {"allocated": 14897190912, "reserved": 36756783104, "fragmentation": 0.01, "total": 150109880320}
    busy = [each for each in SAMPLES if each["gpus"][0]["utilisation"] > 0.5]
    at = [each["time"] for each in busy]
    steps = [
        {"step": n, "step_seconds": 0.25, "phases": {}, "time": time, "peak_bytes": 35959140352, "memory": memory}
        for n, time in enumerate(at, 1)
    ]

    def full(samples: list[dict[str, Any]]) -> list[Finding]:
        return [each for each in health_findings(samples, steps) if each.code == "F061"]

    assert full(SAMPLES) == []
    crowded = with_gpu(lambda gpu: {"memory_used": gpu["memory_used"] + 111_000_000_000})
    (found,) = full(crowded)
    assert found.culprit == "the device of rank 0"
    assert found.verdict.endswith("96%, and other processes hold 101.4 GiB of that")
    assert "other processes on the device" in found.fix
    assert found.patch
    usable = usable_bytes(evidence_of(crowded, steps))
    assert usable == pytest.approx(memory["total"] - 101.4 * 2**30, rel=0.001)
    assert full([*crowded[:18], *SAMPLES[18:]]) == []  # the other process has exited
    later = [each | {"time": each["time"] + 3600} for each in crowded]
    assert full(later) == []  # the other process came after the run


class FakeNvml:
    """NVML with the values of the recorded H200; the test sets the count of uncorrected errors."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 0, 1, 1, 0

    def __init__(self, gpu: dict[str, Any]) -> None:
        self.errors = 0
        self._answers: dict[str, Any] = {
            "Count": 1,
            "HandleByIndex": "handle",
            "UUID": gpu["uuid"],
            "Name": gpu["name"],
            "UtilizationRates": SimpleNamespace(gpu=round(gpu["utilisation"] * 100)),
            "MemoryInfo": SimpleNamespace(used=gpu["memory_used"], total=gpu["memory"]),
            "PowerUsage": round(gpu["power"] * 1000),
            "EnforcedPowerLimit": 700_000,
            "PowerManagementDefaultLimit": 700_000,
            "Temperature": gpu["temperature"],
            "ClockInfo": gpu["sm_clock"] // 1_000_000,
            "MaxClockInfo": gpu["sm_clock_max"] // 1_000_000,
            "CurrentClocksThrottleReasons": 0x4,
            "ComputeRunningProcesses": [SimpleNamespace(pid=pid) for pid in gpu["pids"]],
        }

    def nvmlInit(self) -> None: ...  # noqa: N802

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == "nvmlDeviceGetTotalEccErrors":
            return lambda *_: self.errors
        return lambda *_: self._answers[name.removeprefix("nvmlDeviceGet")]


def test_new_memory_errors_during_a_run_are_reported() -> None:
    busy = next(each for each in SAMPLES if each["gpus"][0]["power"] > 690)
    library = FakeNvml(busy["gpus"][0])
    gpus, samples = GpuSampler(library=library), []
    for errors in (0, 0, 2, 5):
        library.errors = errors
        samples.append(busy | {"gpus": gpus.sample()})
    assert samples[0]["gpus"] == [busy["gpus"][0] | {"power_limit_default": 700.0}]
    assert health_findings(samples[:2]) == []
    (found,) = health_findings(samples)
    assert (found.code, found.culprit, found.severity) == ("F070", NAME, "fault")
    assert found.verdict == f"{NAME} had 5 uncorrected memory errors, 5 of them during this run"
    assert f"`nvidia-smi -r -i {UUID}`" in found.fix
    old = [each | {"gpus": [gpu | {"ecc_uncorrected": 2} for gpu in each["gpus"]]} for each in samples]
    assert [each.severity for each in health_findings(old)] == ["warning"]


def sampled(**keys: float) -> Evidence:
    """Return the evidence of a node with full memory, with `keys` added to ten samples."""
    recipe = parse_recipe("", name="test", overrides=["cluster=1xcpu"])
    full = {"node": 0, "host": "a", "ram": 64 << 30, "ram_used": 61 << 30, "swap_used": 3 << 30}
    samples = tuple(full | {"time": 5.0 * number} | keys for number in range(10))
    return Evidence(recipe=recipe, plan=Plan(mesh=Mesh(), micro_batch=1), samples=samples)


def test_swap_traffic_is_counted_and_old_swapped_pages_are_not() -> None:
    (found,) = swap(sampled(swap_read=20 * MIB, swap_written=20 * MIB))
    assert found.evidence["moved"] == pytest.approx(9 * 5 * 40 * MIB)
    assert not list(swap(sampled(swap_read=0, swap_written=0)))
    assert not list(swap(sampled(swap_read=20 * MIB, swap_written=20 * MIB, ram_used=20 << 30)))
