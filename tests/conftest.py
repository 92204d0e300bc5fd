"""Shared by all tests: one thread per process, no calibration, SIGINT is handled, GPU tests need a GPU."""

import signal

import pytest
import torch

from trimaran.app.request import calibrate_cpu

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ignores SIGINT in background processes
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _cpu_is_not_measured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep commands in this process from measuring the CPU for seconds, in every test with a new cache folder."""
    if request.module.__name__ != "tests.unit.test_calibrate_cpu":
        monkeypatch.setattr(calibrate_cpu, "_measure", lambda *_: None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
