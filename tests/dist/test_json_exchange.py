"""JSON values and int64 arrays between real gloo ranks."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from trimaran.parallel.comm import json_exchange
from trimaran.parallel.comm.json_exchange import (
    all_gather_int64,
    all_gather_json,
    broadcast_json,
    recv_json,
    send_json,
)

VALUES: list[Any] = [None, {}, [1, 2.5, "tünnel", {"nested": [True, None]}], "x" * 100_000, 0, float("inf")]


def _gather_all() -> list[Any]:
    dist.init_process_group("gloo")
    return [all_gather_json([dist.get_rank(), each]) for each in VALUES]


def test_every_rank_gets_the_values_of_all_ranks_in_rank_order() -> None:
    expected = [[[rank, each] for rank in range(3)] for each in VALUES]
    assert run_ranks(3, _gather_all) == [expected] * 3


def _gather_unequal() -> list[Any]:
    dist.init_process_group("gloo")
    return all_gather_json("é" * 1_000_000 * dist.get_rank())


def test_values_may_be_large_and_of_a_different_size_on_each_rank() -> None:
    for values in run_ranks(3, _gather_unequal):
        assert [len(each) for each in values] == [0, 1_000_000, 2_000_000]
        assert set(values[2]) == {"é"}


def _broadcast_from(src: int) -> list[Any]:
    dist.init_process_group("gloo")
    mine = dist.get_rank() == src
    not_json = object()  # must not be touched on ranks that only receive
    return [broadcast_json(each if mine else not_json, src) for each in VALUES]


@pytest.mark.parametrize("src", [0, 2])
def test_every_rank_gets_the_value_of_the_source_only(src: int) -> None:
    assert run_ranks(3, _broadcast_from, src) == [VALUES] * 3


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


def _send_to_first() -> list[Any]:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        for each in VALUES:
            send_json(each, dst=0)
        return []
    return [recv_json(src=1) for _ in VALUES]


def test_one_rank_sends_values_to_another() -> None:
    assert run_ranks(2, _send_to_first) == [VALUES, []]


def _gather_numbers() -> list[Any]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    arrays = [np.array([rank, -(2**62)]), np.array([rank > 0]), np.zeros(0, dtype=np.int64), np.array([[rank], [7]])]
    return [all_gather_int64(each).tolist() for each in arrays]


def test_arrays_of_numbers_come_back_as_one_row_per_rank() -> None:
    expected = [[[0, -(2**62)], [1, -(2**62)]], [[0], [1]], [[], []], [[[0], [7]], [[1], [7]]]]
    assert run_ranks(2, _gather_numbers) == [expected] * 2


def _alone() -> list[Any]:
    dist.init_process_group("gloo")
    return [all_gather_json("one"), broadcast_json("one"), all_gather_int64(np.array([1])).tolist()]


def test_a_single_rank_gets_its_own_value() -> None:
    assert run_ranks(1, _alone) == [[["one"], "one", [[1]]]]


@pytest.mark.parametrize(
    ("backends", "device"),
    [
        ("cpu:gloo,cuda:nccl", torch.device("cpu")),
        ("cpu:gloo,cuda:gloo", torch.device("cpu")),
        ("cuda:nccl", torch.device("cuda", 3)),
    ],
)
def test_values_are_on_the_gpu_only_where_the_group_has_no_cpu_backend(
    monkeypatch: pytest.MonkeyPatch, backends: str, device: torch.device
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert json_exchange._communication_device(None) == device
