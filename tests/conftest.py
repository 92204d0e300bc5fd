"""Shared by all tests: one thread per process, no calibration, SIGINT is handled, GPU tests need a GPU."""

import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch

from trimaran.app.request import ask_hf_facts, calibrate_cpu
from trimaran.core import ModelSection
from trimaran.models.hf_facts import HfFacts
from trimaran.nets.network import WeightsNeededError

torch.set_num_threads(1)
# Nodes that tests lose must not be avoided by the user's own runs.
os.environ["TRIMARAN_BAD_NODES"] = str(Path(tempfile.gettempdir()) / f"trimaran-tests-{os.getpid()}-bad-nodes.jsonl")
# Runs that the user measured must not appear in the plans of tests, nor those of tests in the user's.
os.environ["XDG_STATE_HOME"] = str(Path(tempfile.gettempdir()) / f"trimaran-tests-{os.getpid()}-state")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ignores SIGINT in background processes
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _cpu_is_not_measured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep commands in this process from measuring the CPU for seconds, in every test with a new cache folder."""
    if request.module.__name__ != "tests.unit.test_calibrate_cpu":
        monkeypatch.setattr(calibrate_cpu, "_measure", lambda *_: None)


@pytest.fixture(autouse=True)
def _models_are_built_in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep `plan` from starting a process with torch for every Hugging Face model with a new cache folder."""
    if request.module.__name__ != "tests.unit.test_hf_facts":
        monkeypatch.setattr(ask_hf_facts, "_find", _find_in_this_process)


def _find_in_this_process(section: ModelSection, _: object) -> tuple[HfFacts | None, str]:
    from trimaran.train.find_hf_facts import find_hf_facts  # noqa: PLC0415  it imports transformers

    try:
        return find_hf_facts(section), ""
    except WeightsNeededError as error:
        return None, str(error)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
