"""What the doctor says of GPUs, on the samples that a real H200 gave: it was well, and at its power limit."""

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
from trimaran.app.views.run_state import RunState
from trimaran.app.views.status_lines import glances
from trimaran.core import Finding, Plan, parse_recipe
from trimaran.doctor.evidence import Evidence, question_of
from trimaran.doctor.rules.health import RULES
from trimaran.run import append_line
from trimaran.telemetry.nvml import FAULTS, Gpus

LINES = (Path(__file__).parent / "machines" / "h200-samples.jsonl").read_text().splitlines()
SAMPLES: list[dict[str, Any]] = [json.loads(line) for line in LINES]
NAME = "GPU 0 of vm"
UUID = "GPU-00000000-1111-2222-3333-444444444444"


def told(samples: list[dict[str, Any]], steps: Sequence[dict[str, Any]] = ()) -> list[Finding]:
    """Return what the rules about health find in these samples and steps of a 1B model."""
    settings = ["cluster=1xH200", "model.preset=llama-3.2-1b", "data.seq_len=4096", "train.global_batch=4"]
    recipe = parse_recipe("", name="test", overrides=settings)
    plan = Plan(micro_batch=4, precision="bf16", compile=True, loss="fused")
    evidence = Evidence(
        recipe=recipe,
        plan=plan,
        samples=tuple(samples),
        steps=tuple(steps),
        ask=cache(lambda: question_of(recipe, plan)),
    )
    return [each for rule in RULES for each in rule(evidence)]


def with_gpu(change: Callable[[dict[str, Any]], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the samples with something else in the place of what the GPU said, while it trained."""
    return [
        each | {"gpus": [gpu | change(gpu) if gpu["utilisation"] > 0.5 else gpu for gpu in each["gpus"]]}
        for each in SAMPLES
    ]


def test_a_gpu_at_its_power_limit_is_well() -> None:
    limited = [gpu for each in SAMPLES for gpu in each["gpus"] if "power_cap" in gpu["throttle"]]
    assert len(limited) > 15
    assert min(gpu["sm_clock"] / gpu["sm_clock_max"] for gpu in limited) < 0.7  # its clock does go down
    assert told(SAMPLES) == []
    for seconds in range(1, 10):  # nor to who looks less often
        assert told(SAMPLES[::seconds]) == []


def test_neither_the_watch_nor_the_alert_calls_the_power_limit_a_fault(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    busy = next(each for each in SAMPLES if each["gpus"][0]["power"] > 690)
    append_line(run.samples(0), busy)
    state = RunState(run)
    state.refresh()
    (line,) = [each for each in glances(state) if each.plain.startswith("gpu ")]
    assert line.plain == "gpu       busy 100%, memory 26%, 694 W, 57 °C, at the power limit"
    (ill,) = re.findall(r'reason=~"([^"]+)"', alerts()["TrimaranGpuThrottled"]["expr"])
    reasons = {why for each in SAMPLES for gpu in each["gpus"] for why in gpu["throttle"]}
    assert reasons == {"power_cap"}
    assert [why for why in reasons if re.fullmatch(ill, why)] == []


@pytest.mark.parametrize("reason", FAULTS)
def test_a_gpu_that_is_slowed_down_by_a_fault_is_told(reason: str) -> None:
    (found,) = told(with_gpu(lambda gpu: {"throttle": ["power_cap", reason], "sm_clock": 990_000_000}))
    assert (found.code, found.culprit, found.severity) == ("F069", NAME, "warning")
    assert found.evidence["reasons"] == [reason]
    assert reason.replace("_", " ") in found.verdict


def test_a_clock_that_was_locked_is_told_with_the_command_that_frees_it() -> None:
    """A person has locked the clock, or set it for applications: NVML tells the second, the first perhaps not."""
    for throttle in ([], ["application_clocks"]):
        locked = with_gpu(lambda gpu, why=throttle: {"sm_clock": 345_000_000, "power": 160.0, "throttle": why})
        (found,) = told(locked)
        assert (found.code, found.culprit) == ("F069", NAME)
        assert found.verdict == (
            f"{NAME} is busy at 17% of its clock, held there by a setting: it draws 160 W of 700 W"
        )
        assert f"`nvidia-smi -i {UUID} -rgc`" in found.fix
        assert found.gain == pytest.approx(0.83, abs=0.01)
    assert told(with_gpu(lambda gpu: {"sm_clock": 345_000_000, "power": 160.0, "utilisation": 0.6})) == []


def test_a_power_limit_that_was_lowered_is_told_with_the_command_that_raises_it() -> None:
    low = {"sm_clock": 800_000_000, "power": 200.0, "power_limit": 200.0, "throttle": ["power_cap"]}
    (found,) = told(with_gpu(lambda gpu: low | {"power_limit_default": 700.0}))
    assert found.verdict.endswith("is busy at 40% of its clock, and its power limit is 200 W, by default 700 W")
    assert found.fix.endswith(f"`nvidia-smi -i {UUID} -pl 700`")
    assert told(with_gpu(lambda gpu: low)) == []  # of a limit whose default is not known nothing can be said
    mild = {"power_limit": 600.0, "power_limit_default": 700.0}
    assert told(with_gpu(lambda gpu: mild)) == []  # a limit that costs little is somebody's choice


def test_a_device_that_somebody_else_fills_is_told_and_one_that_has_only_our_run_is_not() -> None:
    """The run of these samples had 34 GiB reserved and 33 in tensors; somebody came who took 103 GiB."""
    memory = {"allocated": 14897190912, "reserved": 36756783104, "fragmentation": 0.01, "total": 150109880320}
    busy = [each for each in SAMPLES if each["gpus"][0]["utilisation"] > 0.5]
    at = [each["time"] for each in busy]
    steps = [
        {"step": n, "step_seconds": 0.25, "phases": {}, "time": time, "peak_bytes": 35959140352, "memory": memory}
        for n, time in enumerate(at, 1)
    ]

    def full(samples: list[dict[str, Any]]) -> list[Finding]:
        return [each for each in told(samples, steps) if each.code == "F061"]

    assert full(SAMPLES) == []
    crowded = with_gpu(lambda gpu: {"memory_used": gpu["memory_used"] + 111_000_000_000})
    (found,) = full(crowded)
    assert found.culprit == "the device of rank 0"
    assert found.verdict.endswith("96%, and 101.4 GiB of that are not this run's")
    assert "who else is on the device" in found.fix
    assert found.patch
    assert full([*crowded[:18], *SAMPLES[18:]]) == []  # somebody who is gone again
    later = [each | {"time": each["time"] + 3600} for each in crowded]
    assert full(later) == []  # nor does it matter who came when the run was over


class Counter:
    """NVML as the recorded H200 answers, whose uncorrected memory errors are counted by the test."""

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


def test_memory_errors_that_nvml_counts_while_a_run_goes_on_are_told() -> None:
    busy = next(each for each in SAMPLES if each["gpus"][0]["power"] > 690)
    library = Counter(busy["gpus"][0])
    gpus, samples = Gpus(library=library), []
    for errors in (0, 0, 2, 5):
        library.errors = errors
        samples.append(busy | {"gpus": gpus.sample()})
    assert samples[0]["gpus"] == [busy["gpus"][0] | {"power_limit_default": 700.0}]
    assert told(samples[:2]) == []
    (found,) = told(samples)
    assert (found.code, found.culprit, found.severity) == ("F070", NAME, "fault")
    assert found.verdict == f"the memory of {NAME} had 5 errors that could not be corrected, 5 of them during this run"
    assert f"`nvidia-smi -r -i {UUID}`" in found.fix
    old = [each | {"gpus": [gpu | {"ecc_uncorrected": 2} for gpu in each["gpus"]]} for each in samples]
    assert [each.severity for each in told(old)] == ["warning"]
