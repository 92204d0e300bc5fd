"""JSON values and int64 arrays between real gloo ranks."""

from typing import Any

import numpy as np
import torch.distributed as dist

from tests.ranks import run_ranks
from trimaran.parallel import all_gather_int64, all_gather_json, broadcast_json, recv_json, send_json

VALUES: list[Any] = [None, {}, [1, 2.5, "tünnel", {"nested": [True, None]}], "x" * 100_000, 0, float("inf")]


def _exchange(rank: int) -> dict[str, Any]:
    not_json = object()  # must not be touched on ranks that only receive
    return {
        "all": [all_gather_json([rank, each]) for each in VALUES],
        "lengths": [len(each) for each in all_gather_json("é" * 1_000_000 * rank)],
        "first": [broadcast_json(each if rank == 0 else not_json, 0) for each in VALUES],
        "last": [broadcast_json(each if rank == 2 else not_json, 2) for each in VALUES],
        "sent": _send_to_first(rank),
        "arrays": _gather_numbers(rank),
    }


def _send_to_first(rank: int) -> list[Any]:
    if rank == 1:
        for each in VALUES:
            send_json(each, dst=0)
    return [recv_json(src=1) for _ in VALUES] if rank == 0 else []


def _gather_numbers(rank: int) -> list[Any]:
    arrays = [np.array([rank, -(2**62)]), np.array([rank > 0]), np.zeros(0, dtype=np.int64), np.array([[rank], [7]])]
    return [all_gather_int64(each).tolist() for each in arrays]


def _on_three_ranks() -> dict[str, Any]:
    dist.init_process_group("gloo")
    return _exchange(dist.get_rank())


def test_three_ranks_exchange_values_and_arrays() -> None:
    for rank, found in enumerate(run_ranks(3, _on_three_ranks)):
        assert found["all"] == [[[each, value] for each in range(3)] for value in VALUES], "in rank order"
        assert found["lengths"] == [0, 1_000_000, 2_000_000], "large ones, of a different size on each rank"
        assert found["first"] == found["last"] == VALUES, "those of the source only"
        assert found["sent"] == (VALUES if rank == 0 else [])
        first, second, empty, column = found["arrays"]
        assert first == [[0, -(2**62)], [1, -(2**62)], [2, -(2**62)]]
        assert second == [[0], [1], [1]]
        assert empty == [[], [], []]
        assert column == [[[0], [7]], [[1], [7]], [[2], [7]]]


def _in_halves() -> list[Any]:
    dist.init_process_group("gloo")
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    group = halves[rank % 2]
    assert isinstance(group, dist.ProcessGroup)
    src = rank % 2 + 2  # a global rank, the second of its group
    gathered = all_gather_json({"rank": rank, "text": "y" * rank}, group)
    return [gathered, broadcast_json(rank, src, group), all_gather_int64(np.array([rank]), group).tolist()]


def test_a_group_exchanges_values_among_its_own_ranks() -> None:
    even = [[{"rank": 0, "text": ""}, {"rank": 2, "text": "yy"}], 2, [[0], [2]]]
    odd = [[{"rank": 1, "text": "y"}, {"rank": 3, "text": "yyy"}], 3, [[1], [3]]]
    assert run_ranks(4, _in_halves) == [even, odd, even, odd]


def _alone() -> list[Any]:
    dist.init_process_group("cpu:gloo,cuda:gloo")  # whose CPU is used, though it could use a GPU
    return [all_gather_json("one"), broadcast_json("one"), all_gather_int64(np.array([1])).tolist()]


def test_a_single_rank_gets_its_own_value() -> None:
    assert run_ranks(1, _alone) == [[["one"], "one", [[1]]]]
