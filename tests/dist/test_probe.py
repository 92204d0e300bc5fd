"""Ranks that sum and multiply for the doctor: right, wrong, silent, dead."""

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import _free_port, run_ranks
from trimaran.doctor.measure_machine import measure
from trimaran.doctor.probe_process import ProbeProcess
from trimaran.hardware import parse_cluster
from trimaran.probe.probe_nodes import NodeRendezvous
from trimaran.probe.probe_ranks import count_wrong, measure_products, measure_sums, run_forked

CPU = torch.device("cpu")


def test_sums_of_real_ranks_are_right_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = measure_sums("cpu", 3, seconds=0.05)
    assert (found["ranks"], found["wrong"], found.get("error")) == (3, {}, None)
    assert found["checked"] > 1_000_000
    assert 0 < found["seconds"] < 10


def test_a_bit_that_flips_on_one_rank_is_seen_there() -> None:
    assert run_ranks(2, sum_with_a_flip) == [0, 2]


def sum_with_a_flip() -> int:
    """Sum on two ranks, of which the second gets one number of each long message wrong."""
    dist.init_process_group("gloo")
    rank, right = dist.get_rank(), dist.all_reduce

    def flipping(message: torch.Tensor, *args: Any, **options: Any) -> None:
        right(message, *args, **options)
        if rank == 1 and len(message) > 10:
            message[7] += 1.0

    dist.all_reduce = flipping
    return count_wrong(rank, 2, (1, 17, 100), CPU)


def test_products_are_timed() -> None:
    found = measure_products("cpu", devices=1, cores=1, seconds=0.02)
    assert found["rates"]["the CPU"] > 1e8
    assert (found["precision"], found["failures"]) == ("fp32", {})


def misbehave(how: str) -> str:
    if how == "raise":
        raise ValueError("no such device")
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(60)
    return how


def test_ranks_that_fail_die_or_hang_are_told_apart() -> None:
    answers = run_forked(misbehave, [("well",), ("raise",), ("die",), ("hang",)], seconds=1.0)
    assert answers[0] == "well"
    assert answers[1] == {"error": "ValueError: no such device"}
    assert answers[2] == {"error": "a rank died without a word"}
    assert answers[3] is None


def test_a_torch_that_cannot_be_imported_is_the_reason_why_nothing_was_measured(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    with ProbeProcess({"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]}) as probe:
        found = measure(probe, parse_cluster("2xcpu"))
    assert found.missing.endswith("ImportError: libcudart.so.13: cannot open shared object file")


def test_two_nodes_meet_compare_clocks_and_measure_their_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    first, second = run_ranks(2, meet, f"127.0.0.1:{_free_port()}")
    assert first["names"] == second["names"] == [f"{socket.gethostname()} (node {node})" for node in (0, 1)]
    assert abs(first["skews"][1]) < 1.0
    assert first["seconds"] == second["seconds"]
    assert 0 < first["seconds"]["0-1"] < 20
    assert (first["others"], second["others"]) == ({"1": "from 1"}, {})


def meet(address: str) -> dict[str, Any]:
    node = int(os.environ["RANK"])
    meeting = NodeRendezvous(address, 2, node, seconds=20.0)
    seconds = meeting.measure([(0, 1)], kind="cpu", devices=1)
    others = meeting.share(f"from {node}")
    return {"names": meeting.names, "skews": meeting.skews, "seconds": seconds, "others": others}


def test_a_node_that_does_not_come_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"node 1, 2 of 3 did not come within 0\.3 s"):
        NodeRendezvous(f"127.0.0.1:{_free_port()}", 3, 0, seconds=0.3)
