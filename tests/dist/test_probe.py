"""The doctor's probe: all-reduces and matmuls on real ranks, with wrong results, errors, deaths and hangs."""

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import free_port, run_ranks
from trimaran.machine import (
    NodeRendezvous,
    ProbeProcess,
    count_wrong_values,
    measure_all_reduce,
    measure_devices,
    measure_matmuls,
    parse_cluster,
    run_forked,
)

CPU = torch.device("cpu")


def test_all_reduces_of_real_ranks_are_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    measured = measure_all_reduce("cpu", 3, seconds=0.05)
    assert (measured["ranks"], measured["wrong"], measured.get("error")) == (3, {}, None)
    assert measured["checked"] > 1_000_000
    assert 0 < measured["seconds"] < 10


def test_a_wrong_value_on_one_rank_is_counted_there() -> None:
    assert run_ranks(2, count_with_a_wrong_value) == [0, 2]


def count_with_a_wrong_value() -> int:
    """All-reduce on two ranks. The second one gets one value of each long message wrong."""
    dist.init_process_group("gloo")
    rank, all_reduce = dist.get_rank(), dist.all_reduce

    def corrupting(message: torch.Tensor, *args: Any, **options: Any) -> None:
        all_reduce(message, *args, **options)
        if rank == 1 and len(message) > 10:
            message[7] += 1.0

    dist.all_reduce = corrupting
    return count_wrong_values(rank, 2, (1, 17, 100), CPU)


def test_matmuls_are_timed() -> None:
    measured = measure_matmuls("cpu", devices=1, cores=1, seconds=0.02)
    assert measured["rates"]["the CPU"] > 1e8
    assert (measured["precision"], measured["failures"]) == ("fp32", {})


def fail(how: str) -> str:
    if how == "raise":
        raise ValueError("no such device")
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(60)
    return how


def test_ranks_that_raise_die_or_hang_are_distinguished() -> None:
    answers = run_forked(fail, [("not at all",), ("raise",), ("die",), ("hang",)], seconds=1.0)
    assert answers[0] == "not at all"
    assert answers[1] == {"error": "ValueError: no such device"}
    assert answers[2] == {"error": "a rank died without an error message"}
    assert answers[3] is None


def test_a_torch_that_cannot_be_imported_is_reported_in_place_of_measurements(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    with ProbeProcess({"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]}) as probe:
        measured = measure_devices(probe, parse_cluster("2xcpu"))
    assert measured.missing.endswith("ImportError: libcudart.so.13: cannot open shared object file")


def test_two_nodes_meet_compare_clocks_and_measure_their_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    first, second = run_ranks(2, measure_node, f"127.0.0.1:{free_port()}")
    assert first["names"] == second["names"] == [f"{socket.gethostname()} (node {node})" for node in (0, 1)]
    assert abs(first["skews"][1]) < 1.0
    assert first["seconds"] == second["seconds"]
    assert 0 < first["seconds"]["0-1"] < 20
    assert (first["others"], second["others"]) == ({"1": "from 1"}, {})


def measure_node(address: str) -> dict[str, Any]:
    node = int(os.environ["RANK"])
    nodes = NodeRendezvous(address, 2, node, seconds=20.0)
    seconds = nodes.measure([(0, 1)], kind="cpu", devices=1)
    others = nodes.gather(f"from {node}")
    return {"names": nodes.names, "skews": nodes.skews, "seconds": seconds, "others": others}


def test_nodes_that_do_not_join_are_named() -> None:
    with pytest.raises(TimeoutError, match=r"node 1, 2 of 3 did not join within 0\.3 s"):
        NodeRendezvous(f"127.0.0.1:{free_port()}", 3, 0, seconds=0.3)
