"""The replica check finds a single flipped bit in one replica, and names the rank."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from trimaran.parallel import TensorShard
from trimaran.train import ReplicaCheck, ReplicaDifference, bit_checksum


def shards(rank: int, *, shared: torch.Tensor) -> list[TensorShard]:
    """Return a replicated weight, a sharded one, and two tensors that may differ: a statistic and a moment."""
    rows = torch.full((1, 3), float(rank))
    running = torch.full((3,), float(rank))
    return [
        TensorShard(key="model/norm", tensor=shared, shape=(5,), start=(0,)),
        TensorShard(key="model/rows", tensor=rows, shape=(4, 3), start=(rank, 0)),
        TensorShard(key="model/running", tensor=running, shape=(3,), start=(0,), changed_by_forward=True),
        TensorShard(key="optimizer/exp_avg/norm", tensor=running, shape=(3,), start=(0,)),
    ]


def check_with_a_flip(dtype: torch.dtype, flipped: int | None) -> list[ReplicaDifference | None]:
    """Return the results of five checks. After the third, flip one bit of the replicated weight on rank `flipped`."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    shared = torch.arange(5, dtype=torch.float32).to(dtype)
    replica_check = ReplicaCheck(lambda: shards(rank, shared=shared), device=torch.device("cpu"), every=10)
    results = [replica_check.check(10), replica_check.check(15), replica_check.check(20)]
    if rank == flipped:
        shared.view(torch.uint8)[6] ^= 1
    return [*results, replica_check.check(25), replica_check.check(30)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_of_one_replica_names_its_rank(dtype: torch.dtype) -> None:
    for results in run_ranks(3, check_with_a_flip, dtype, 2):
        assert results[:4] == [None] * 4
        assert results[4] == ReplicaDifference(step=30, ranks=(2,), known=True, keys=("model/norm",), since=20)


def resume_at(step: int) -> ReplicaDifference | None:
    """Resume at `step` with equal replicas; return the result of the first check, at which one differs."""
    dist.init_process_group("gloo")
    shared = torch.zeros(5)
    replica_check = ReplicaCheck(lambda: shards(dist.get_rank(), shared=shared), device=torch.device("cpu"), every=10)
    assert replica_check.check(step + 1) is None
    shared[0] = dist.get_rank()
    return replica_check.check(step + 10)


def test_replicas_count_as_equal_at_the_step_of_a_resume() -> None:
    for difference in run_ranks(2, resume_at, 40):
        assert difference is not None
        assert difference.since == 40


def test_with_two_replicas_both_ranks_are_suspect() -> None:
    for results in run_ranks(2, check_with_a_flip, torch.float32, 1):
        assert results[4] == ReplicaDifference(step=30, ranks=(0, 1), known=False, keys=("model/norm",), since=20)


def test_equal_replicas_are_not_reported() -> None:
    for results in run_ranks(3, check_with_a_flip, torch.float32, None):
        assert results == [None] * 5


def test_the_checksum_does_not_depend_on_the_storage_offset() -> None:
    for size in (6, 7, 8):
        values = torch.arange(20, dtype=torch.bfloat16)
        assert [bit_checksum(values[3 : 3 + size]), bit_checksum(values[3 : 3 + size].clone())] == [
            bit_checksum(values[3 : 3 + size])
        ] * 2


def test_every_single_bit_changes_the_checksum() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        values = torch.ones(3, dtype=dtype)
        before = int(bit_checksum(values))
        for byte in range(values.element_size()):
            for bit in range(8):
                flipped = values.clone()
                flipped.view(torch.uint8)[byte] ^= 1 << bit
                assert int(bit_checksum(flipped)) != before
