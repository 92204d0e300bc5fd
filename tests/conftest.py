"""Shared by all tests: one thread per process, no calibration, SIGINT is handled, GPU tests need a GPU."""

import gc
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

from tests.forked import start_fork_source
from tests.slow_cases import SLOW_CASES
from trimaran.app.recipe import ask_torch
from trimaran.core import ModelSection
from trimaran.models import HfFacts
from trimaran.nets import WeightsNeededError

torch.set_num_threads(1)
# Nodes that tests lose must not be avoided by the user's own runs.
os.environ["TRIMARAN_BAD_NODES"] = str(Path(tempfile.gettempdir()) / f"trimaran-tests-{os.getpid()}-bad-nodes.jsonl")
# Runs that the user measured must not appear in the plans of tests, nor those of tests in the user's.
os.environ["XDG_STATE_HOME"] = str(Path(tempfile.gettempdir()) / f"trimaran-tests-{os.getpid()}-state")
LONGEST_FIRST = ("web", "e2e", "fault", "dist")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ignores SIGINT in background processes
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _onednn_stays_enabled() -> Iterator[None]:
    """Undo what torch does on a CPU without bf16: its first bf16 matmul disables oneDNN, also for fp32, and for good.

    Without it sums are rounded otherwise, so that parity would depend on the tests before.
    """
    yield
    torch.backends.mkldnn.set_flags(_enabled=True)


@pytest.fixture(autouse=True)
def _cpu_is_not_measured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep commands in this process from measuring the CPU for seconds, in every test with a new cache folder."""
    if request.module.__name__ != "tests.unit.test_calibrate_cpu":
        monkeypatch.setattr(ask_torch, "_measure", lambda *_: None)


@pytest.fixture(autouse=True)
def _models_are_built_in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep `plan` from starting a process with torch for every Hugging Face model with a new cache folder."""
    if request.module.__name__ != "tests.unit.test_hf_facts":
        monkeypatch.setattr(ask_torch, "_find", _find_in_this_process)


def _find_in_this_process(section: ModelSection, _: object) -> tuple[HfFacts | None, str]:
    from trimaran.train import find_hf_facts  # noqa: PLC0415  it imports transformers

    try:
        return find_hf_facts(section), ""
    except WeightsNeededError as error:
        return None, str(error)


def pytest_configure(config: pytest.Config) -> None:
    """Start the process that ranks and commands are forked from; it imports torch while tests are collected."""
    if not config.option.collectonly:
        start_fork_source()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what the collection imports out of later garbage collections.

    These are millions of objects that live to the end. A full collection takes seconds among them, in this process and
    in every rank that is forked from it.
    """
    gc.disable()  # imports leave little garbage
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow cases, put folders of long tests first, so that short ones fill up the end, and skip what needs a GPU.

    Slow are those of `tests/slow_cases.py`; others are marked where they are.
    """
    for item in items:
        if item.nodeid in SLOW_CASES:
            item.add_marker(pytest.mark.slow)
    items.sort(key=_place)
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _place(item: pytest.Item) -> int:
    """Return where a test's folder is in LONGEST_FIRST, or behind. Tests of one folder stay in their order."""
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)
