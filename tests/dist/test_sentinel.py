"""One bit in one replica: found, and the rank named."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from trimaran.checkpoint.tensor_shards import TensorShard
from trimaran.train.health.replica_check import ReplicaDifference, ReplicaCheck, bit_sum


def pieces(rank: int, *, shared: torch.Tensor) -> list[TensorShard]:
    """Return what all ranks hold alike, what only this rank holds, and a statistic that may differ."""
    rows = torch.full((1, 3), float(rank))
    running = torch.full((3,), float(rank))
    return [
        TensorShard(key="model/norm", tensor=shared, shape=(5,), start=(0,)),
        TensorShard(key="model/rows", tensor=rows, shape=(4, 3), start=(rank, 0)),
        TensorShard(key="model/running", tensor=running, shape=(3,), start=(0,), fluid=True),
        TensorShard(key="optimizer/exp_avg/norm", tensor=running, shape=(3,), start=(0,)),
    ]


def watch(dtype: torch.dtype, flipped: int | None) -> list[ReplicaDifference | None]:
    """Check three times; before the third, one bit of one weight of rank `flipped` turns over."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    shared = torch.arange(5, dtype=torch.float32).to(dtype)
    replica_check = ReplicaCheck(lambda: pieces(rank, shared=shared), device=torch.device("cpu"), every=10)
    found = [replica_check.check(10), replica_check.check(15), replica_check.check(20)]
    if rank == flipped:
        shared.view(torch.uint8)[6] ^= 1
    return [*found, replica_check.check(25), replica_check.check(30)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_of_one_replica_names_its_rank(dtype: torch.dtype) -> None:
    for found in run_ranks(3, watch, dtype, 2):
        assert found[:4] == [None] * 4
        assert found[4] == ReplicaDifference(step=30, ranks=(2,), known=True, keys=("model/norm",), since=20)


def begin_at(step: int) -> ReplicaDifference | None:
    """A run that goes on from `step`: its replicas are equal there, and one is not at the first check."""
    dist.init_process_group("gloo")
    shared = torch.zeros(5)
    replica_check = ReplicaCheck(lambda: pieces(dist.get_rank(), shared=shared), device=torch.device("cpu"), every=10)
    assert replica_check.check(step + 1) is None
    shared[0] = dist.get_rank()
    return replica_check.check(step + 10)


def test_where_a_run_was_resumed_its_replicas_were_equal() -> None:
    for found in run_ranks(2, begin_at, 40):
        assert found is not None
        assert found.since == 40


def test_of_two_replicas_nobody_knows_which_is_right() -> None:
    for found in run_ranks(2, watch, torch.float32, 1):
        assert found[4] == ReplicaDifference(step=30, ranks=(0, 1), known=False, keys=("model/norm",), since=20)


def test_replicas_that_are_equal_raise_no_alarm() -> None:
    for found in run_ranks(3, watch, torch.float32, None):
        assert found == [None] * 5


def test_where_a_tensor_lies_does_not_change_its_sum() -> None:
    for size in (6, 7, 8):
        values = torch.arange(20, dtype=torch.bfloat16)
        assert [bit_sum(values[3 : 3 + size]), bit_sum(values[3 : 3 + size].clone())] == [
            bit_sum(values[3 : 3 + size])
        ] * 2


def test_every_single_bit_changes_the_sum() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        values = torch.ones(3, dtype=dtype)
        before = int(bit_sum(values))
        for byte in range(values.element_size()):
            for bit in range(8):
                spoilt = values.clone()
                spoilt.view(torch.uint8)[byte] ^= 1 << bit
                assert int(bit_sum(spoilt)) != before
