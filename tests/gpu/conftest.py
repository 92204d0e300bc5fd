"""What the GPU tests share."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True, scope="module")
def _no_process_group_is_left() -> Iterator[None]:
    """Destroy the process group that a file's tests initialised, so that no file depends on the one before it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
