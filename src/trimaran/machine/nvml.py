"""Samples the GPUs of this node with NVML; without NVML or GPUs there are no samples."""

import contextlib
import importlib
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

MEGA = 1_000_000
# Bits of nvmlClocksEventReason* (nvml.h), without idle.
THROTTLE_REASONS = {
    0x02: "application_clocks",
    0x04: "power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
    0x100: "display_clocks",
}
# Those that mean heat or a weak power supply. Not `power_cap`: a GPU under full load is at its power limit.
HARDWARE_THROTTLE_REASONS = ("hw_slowdown", "thermal", "hw_thermal", "power_brake")


class GpuSampler:
    """Samples the GPUs that the run may use. `visible` is like CUDA_VISIBLE_DEVICES: None means all, "" none.

    `library` is the module `pynvml` (nvidia-ml-py) or a fake with its functions.
    """

    def __init__(self, visible: str | None = None, *, library: Any = None) -> None:
        self._library, self._handles = library, {}
        self._warned = False
        if visible is not None and not visible.strip():
            return
        try:
            self._library = library or importlib.import_module("pynvml")
            self._library.nvmlInit()
            self._handles = self._find(visible)
        except Exception as error:  # no library, no driver, no permission or no GPU
            log.info("GPUs are not sampled: %s", error)

    def _find(self, visible: str | None) -> dict[int, Any]:
        """Return the handles of the GPUs by their CUDA index in the ranks."""
        nvml = self._library
        if visible is None:
            return {number: nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())}
        found = {}
        for number, name in enumerate(part.strip() for part in visible.split(",")):
            by_index = name.isdigit()
            found[number] = (
                nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else nvml.nvmlDeviceGetHandleByUUID(name)
            )
        return found

    def sample(self) -> list[dict[str, Any]]:
        """Return one sample per GPU; values that it does not support are left out."""
        return [self._sample_gpu(number, handle) for number, handle in self._handles.items()]

    def _sample_gpu(self, number: int, handle: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"index": number}
        for query in _QUERIES:
            try:
                found |= query(self._library, handle)
            except Exception as error:  # many GPUs do not support all queries; one that fell off its bus supports none
                if not self._warned:
                    log.info("GPU %d does not report all values: %s", number, error)
                self._warned = True
        return found

    def close(self) -> None:
        if self._handles:
            with contextlib.suppress(Exception):
                self._library.nvmlShutdown()


def _names(nvml: Any, handle: Any) -> dict[str, Any]:
    return {"uuid": _text(nvml.nvmlDeviceGetUUID(handle)), "name": _text(nvml.nvmlDeviceGetName(handle))}


def _utilisation(nvml: Any, handle: Any) -> dict[str, Any]:
    return {"utilisation": nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100}


def _memory(nvml: Any, handle: Any) -> dict[str, Any]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {"memory_used": memory.used, "memory": memory.total}


def _power(nvml: Any, handle: Any) -> dict[str, Any]:
    return {"power": nvml.nvmlDeviceGetPowerUsage(handle) / 1000}


def _power_limit(nvml: Any, handle: Any) -> dict[str, Any]:
    return {"power_limit": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000}


def _default_power_limit(nvml: Any, handle: Any) -> dict[str, Any]:
    return {"power_limit_default": nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000}


def _temperature(nvml: Any, handle: Any) -> dict[str, Any]:
    return {"temperature": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)}


def _clock(nvml: Any, handle: Any) -> dict[str, Any]:
    return {"sm_clock": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * MEGA}


def _max_clock(nvml: Any, handle: Any) -> dict[str, Any]:
    return {"sm_clock_max": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM) * MEGA}


def _throttle(nvml: Any, handle: Any) -> dict[str, Any]:
    bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return {"throttle": [reason for bit, reason in THROTTLE_REASONS.items() if bits & bit]}


def _errors(nvml: Any, handle: Any) -> dict[str, Any]:
    """Return the uncorrected memory errors since the driver was loaded."""
    kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    return {"ecc_uncorrected": nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since)}


def _processes(nvml: Any, handle: Any) -> dict[str, Any]:
    return {"pids": [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]}


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name  # older versions of the library return bytes


_QUERIES: tuple[Callable[[Any, Any], dict[str, Any]], ...] = (
    _names,
    _utilisation,
    _memory,
    _power,
    _power_limit,
    _default_power_limit,
    _temperature,
    _clock,
    _max_clock,
    _throttle,
    _errors,
    _processes,
)
