"""`trimaran bench comm` with real ranks: here, under torchrun, on two nodes with a slow link, and with wrong values."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.chaos.wire import ADDRESSES
from tests.ranks import free_port, run_ranks
from trimaran.app import main
from trimaran.machine import BUS_FACTORS, CommGroup, count_wrong, measure

ROOT = Path(__file__).parents[2]
needs_network = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not Path("/dev/net/tun").exists(), reason="needs root, ip and tun"
)


def bench(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["bench", "comm", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_two_ranks_time_every_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    sizes = [1 << 10, 1 << 14, 1 << 18]
    request = {"kind": "cpu", "backend": "gloo", "dtype": "fp32", "first_rank": 0, "ranks": 2, "world_size": 2,
               "first_device": 0, "address": "", "hosts_store": True, "rank_environments": [{}, {}],
               "timeout_seconds": 60.0, "collectives": list(BUS_FACTORS), "sizes": sizes, "seconds": 0.5,
               "groups": [{"name": "world", "ranks": [[0, 1]]}]}  # fmt: skip
    measured = measure(request)
    assert measured["wrong"] == []
    assert len(measured["hosts"]) == 2
    for name in BUS_FACTORS:
        points = [each for each in measured["points"] if each["collective"] == name]
        assert [each["bytes"] for each in points] == sizes[: len(points)]
        assert all(len(each["rounds"]) >= 3 and min(each["rounds"]) > 0 for each in points)
        left_out = [each["bytes"] for each in measured["skipped"] if each["collective"] == name]
        assert left_out == sizes[len(points) :]


@pytest.mark.slow  # it starts torch in a process of its own, as the test of four ranks does
def test_two_ranks_measure_every_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIMARAN_CACHE", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    answer = bench("--ranks", "2", "--sizes", "1KiB..1MiB", "--seconds", "1.5", "--calibrate", capsys=capsys)
    assert (answer["world_size"], answer["backend"], answer["wrong"]) == (2, "gloo", [])
    assert {each["collective"] for each in answer["curves"]} == BUS_FACTORS.keys()
    for curve in answer["curves"]:
        sizes = [point["num_bytes"] for point in curve["points"]]
        assert sizes == sorted(sizes)
        for point in curve["points"]:
            assert 0 < point["seconds"] <= point["median_seconds"] <= point["max_seconds"]
            factor = BUS_FACTORS[curve["collective"]](2)
            assert point["bus_gb_per_second"] == pytest.approx(factor * point["num_bytes"] / point["seconds"] / 1e9)
    written = json.loads(Path(answer["calibration"]).read_text())
    assert written["collectives"]["devices"] == 2
    assert written["collectives"]["latency_us"] > 1
    assert main(["plan", "--set", "cluster=2xcpu", "--json"]) == 0


@pytest.mark.slow
def test_four_ranks_in_pairs_work_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = ["--ranks", "4", "--groups", "world,2", "--collectives", "all_reduce", "--sizes", "4KiB,64KiB"]
    answer = bench(*options, "--seconds", "0.5", "--dtype", "bf16", capsys=capsys)
    by_group = {each["group"]: each for each in answer["curves"]}
    assert (by_group["world"]["ranks"], by_group["world"]["groups"]) == (4, 1)
    assert (by_group["2"]["ranks"], by_group["2"]["groups"]) == (2, 2)
    assert [pair["ranks"] for pair in answer["pairs"]] == [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    assert answer["wrong"] == []


def test_a_wrong_value_is_counted_for_every_collective() -> None:
    right, wrong = zip(*run_ranks(3, count_right_and_wrong), strict=True)
    assert [sum(each) for each in right] == [0, 0, 0]
    assert all(count > 0 for count in wrong[1]), wrong


def count_right_and_wrong() -> tuple[list[int], list[int]]:
    """Check all collectives, then again with one value of the buffer wrong on rank 1."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = CommGroup(group=None, ranks=(0, 1, 2), place=rank)
    options: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    right = [count_wrong(name, group, **options) for name in BUS_FACTORS]
    double = torch.Tensor.double

    def corrupting(tensor: torch.Tensor) -> torch.Tensor:
        changed = double(tensor)
        changed += 1 if rank == 1 else 0
        return changed

    torch.Tensor.double = corrupting  # pyrefly: ignore
    return right, [count_wrong(name, group, **options) for name in BUS_FACTORS]


@pytest.mark.slow  # it starts torchrun
def test_torchruns_ranks_measure_together(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
               str(free_port()), "-m", "trimaran", "bench", "comm", "--collectives", "all_reduce,broadcast",
               "--sizes", "1KiB..64KiB", "--seconds", "1", "--out", str(out)]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("world: 2 ranks") == 1  # rank 0 alone prints
    assert json.loads(out.read_text())["world_size"] == 2


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces, without a link between them."""
    names = [f"bc{os.getpid()}{letter}" for letter in "ab"]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def bench_nodes(names: list[str], addresses: tuple[str, str], cache: Path, *options: str) -> dict[str, Any]:
    """Return node 0's answer. Every node runs the same command in its namespace."""
    command = [sys.executable, "-m", "trimaran", "bench", "comm", "--json", "--nodes", "2", "--address",
               f"{addresses[0]}:29412", *options]  # fmt: skip
    own = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    processes = [
        subprocess.Popen(["ip", "netns", "exec", name, *command, "--node", str(node)], stdout=subprocess.PIPE,
                         env=own | {"TRIMARAN_CACHE": str(cache / f"node-{node}")}, cwd=ROOT)
        for node, name in enumerate(names)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=400)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[1] == b""  # node 0 alone answers
    return json.loads(outputs[0])


@needs_network
@pytest.mark.skipif(not shutil.which("tc"), reason="needs tc")
@pytest.mark.slow  # a message of 8 MiB takes two thirds of a second on this link
def test_the_bandwidth_of_a_shaped_link_is_measured_within_15_percent(namespaces: list[str], tmp_path: Path) -> None:
    """The kernel shapes both ends to 100 Mbit/s, 12.5 MB/s with the headers of Ethernet, IP and TCP.

    It lets a burst of 16 kB pass after each pause, so messages are much larger than that.
    """
    first, second = namespaces
    run = partial(subprocess.run, check=True)
    run(f"ip link add {first}e netns {first} type veth peer name {second}e netns {second}".split())
    for name, address in zip(namespaces, ("10.77.0.1", "10.77.0.2"), strict=True):
        run(f"ip -n {name} addr add {address}/24 dev {name}e".split())
        run(f"ip -n {name} link set {name}e up".split())
        run(f"tc -n {name} qdisc add dev {name}e root tbf rate 100mbit burst 16kb latency 400ms".split())
    answer = bench_nodes(namespaces, ("10.77.0.1", "10.77.0.2"), tmp_path, "--sizes", "1MiB..8MiB*2", "--seconds",
                         "60", "--collectives", "all_reduce,all_gather,all_to_all,broadcast,send_recv",
                         "--calibrate")  # fmt: skip
    fits = {each["collective"]: each["fit"] for each in answer["curves"]}
    print({name: (round(fit["bus_gb_per_second"] * 1e3, 2), round(fit["alpha_us"])) for name, fit in fits.items()})
    assert 0.85 * 12.5e-3 < median(fit["bus_gb_per_second"] for fit in fits.values()) < 1.05 * 12.5e-3, fits
    for name, fit in fits.items():  # other programs on this machine can only make it slower
        assert 0.6 * 12.5e-3 < fit["bus_gb_per_second"] < 1.05 * 12.5e-3, (name, fit)
    written = json.loads(Path(answer["calibration"]).read_text())
    assert written["network"]["all_reduce_gb_per_second"] == pytest.approx(fits["all_reduce"]["bus_gb_per_second"])
    assert "collectives" not in written  # nothing was measured inside a node


@pytest.fixture
def slow_wire(namespaces: list[str]) -> Iterator[list[str]]:
    """A link of 100 Mbit/s and 10 ms each way, so a round trip of 20 ms. A process relays its packets."""
    command = [sys.executable, "-m", "tests.chaos.wire", *namespaces, "--rate", "100", "--delay", "0.01"]
    wire = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert wire.stdout is not None
        assert wire.stdout.readline() == b"up\n"
        yield namespaces
    finally:
        wire.kill()
        wire.wait()


@needs_network
@pytest.mark.slow  # every message takes a round trip
def test_the_latency_of_a_link_of_20_ms_is_measured_within_20_percent(slow_wire: list[str], tmp_path: Path) -> None:
    """Gloo needs a round trip for each message, and an all-reduce of two ranks has two.

    Messages are small: on a busy machine the relay drops packets of large ones.
    """
    collectives = {"all_reduce": 2, "all_gather": 1, "broadcast": 1, "send_recv": 1}
    answer = bench_nodes(slow_wire, ADDRESSES, tmp_path, "--sizes", "1KiB..64KiB", "--seconds", "20",
                         "--collectives", ",".join(collectives))  # fmt: skip
    for curve in answer["curves"]:
        expected = 20e3 * collectives[curve["collective"]]
        print(curve["collective"], curve["points"][0]["seconds"] * 1e6, curve["fit"]["alpha_us"])
        assert 0.98 * expected < curve["points"][0]["seconds"] * 1e6 < 1.2 * expected, curve
        assert 0.8 * expected < curve["fit"]["alpha_us"] < 1.2 * expected, curve
