"""How the GPUs of this machine are doing, as NVIDIA's management library tells; nothing where there is none."""

import contextlib
import importlib
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

MEGA = 1_000_000
# Bits of the reasons why a clock is lower than it could be (nvml.h, nvmlClocksEventReason*). Idle is none: the GPU has
# nothing to do. What people set themselves is told apart from what the hardware does.
THROTTLES = {
    0x02: "application_clocks",
    0x04: "power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
    0x100: "display_clocks",
}
# Those that mean heat, or a power supply that is too weak. `power_cap` is none: a GPU at full load is at its limit.
FAULTS = ("hw_slowdown", "thermal", "hw_thermal", "power_brake")


class Gpus:
    """The GPUs that the run may use. `visible` is as CUDA_VISIBLE_DEVICES: None is all of them, "" none.

    `library` is the module `pynvml` (nvidia-ml-py) or one that answers like it.
    """

    def __init__(self, visible: str | None = None, *, library: Any = None) -> None:
        self._library, self._handles = library, {}
        self._fails = False
        if visible is not None and not visible.strip():
            return
        try:
            self._library = library or importlib.import_module("pynvml")
            self._library.nvmlInit()
            self._handles = self._find(visible)
        except Exception as error:  # no library, no driver, no permission, no GPU: there is nothing to tell then
            log.info("GPUs are not sampled: %s", error)

    def _find(self, visible: str | None) -> dict[int, Any]:
        """Return the handles of the GPUs by the number that CUDA gives them in the ranks."""
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
        """Return what each GPU tells; what it does not tell is left out."""
        return [self._of(number, handle) for number, handle in self._handles.items()]

    def _of(self, number: int, handle: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"index": number}
        for ask in _QUESTIONS:
            try:
                found |= ask(self._library, handle)
            except Exception as error:  # many devices do not answer all; one that fell off its bus answers none
                if not self._fails:
                    log.info("GPU %d does not tell all: %s", number, error)
                self._fails = True
        return found

    def close(self) -> None:
        if self._handles:
            with contextlib.suppress(Exception):
                self._library.nvmlShutdown()


def _names(nvml: Any, handle: Any) -> dict[str, Any]:
    return {"uuid": _text(nvml.nvmlDeviceGetUUID(handle)), "name": _text(nvml.nvmlDeviceGetName(handle))}


def _use(nvml: Any, handle: Any) -> dict[str, Any]:
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


def _most_clock(nvml: Any, handle: Any) -> dict[str, Any]:
    return {"sm_clock_max": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM) * MEGA}


def _throttle(nvml: Any, handle: Any) -> dict[str, Any]:
    bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return {"throttle": [reason for bit, reason in THROTTLES.items() if bits & bit]}


def _errors(nvml: Any, handle: Any) -> dict[str, Any]:
    """Return the memory errors since the driver was loaded that could not be corrected."""
    kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    return {"ecc_uncorrected": nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since)}


def _processes(nvml: Any, handle: Any) -> dict[str, Any]:
    return {"pids": [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]}


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name  # older versions of the library give bytes


_QUESTIONS: tuple[Callable[[Any, Any], dict[str, Any]], ...] = (
    _names,
    _use,
    _memory,
    _power,
    _power_limit,
    _default_power_limit,
    _temperature,
    _clock,
    _most_clock,
    _throttle,
    _errors,
    _processes,
)
