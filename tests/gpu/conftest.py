"""What the GPU tests share."""

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True, scope="module")
def _no_process_group_is_left() -> Iterator[None]:
    """Destroy the process group that a file's tests initialised, so that no file depends on the one before it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _gpu_is_shared_or_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a test marked `whole_gpu` wait until no other process of `pytest -n` uses the GPU, and others wait for it."""
    alone = request.node.get_closest_marker("whole_gpu") is not None
    with (Path(tempfile.gettempdir()) / "trimaran-tests-gpu.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
