"""`trimaran doctor` on four nodes at once, one with a slow link, a silent network card or a wrong clock."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

NODES = 4
PORT = 29400
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="needs root, ip and tc"),
]


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Four network namespaces on a bridge; a name with a final `w` is the interface on the bridge's side."""
    tag = f"td{os.getpid() % 100000}"
    names = [f"{tag}{letter}" for letter in "abcd"]
    bridge = f"{tag}br"
    try:
        run(f"ip link add {bridge} type bridge")
        run(f"ip link set {bridge} up")
        for node, name in enumerate(names):
            run(f"ip netns add {name}")
            run(f"ip -n {name} link set lo up")
            run(f"ip link add {name}w type veth peer name {name}e netns {name}")
            run(f"ip link set {name}w master {bridge} up")
            run(f"ip -n {name} addr add 10.79.0.{node + 1}/24 dev {name}e")
            run(f"ip -n {name} link set {name}e up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)
        subprocess.run(["ip", "link", "delete", bridge], check=False)


def run_checks(
    names: list[str], environments: Mapping[int, Mapping[str, str]] | None = None
) -> tuple[int, dict[str, Any]]:
    """Return node 0's exit code and output. Every node runs the same command in its namespace."""
    command = [sys.executable, "-m", "trimaran", "doctor", "--json", "--nodes", str(len(names))]
    command += ["--address", f"10.79.0.1:{PORT}"]
    own = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *command, "--node", str(node)],
            stdout=subprocess.PIPE,
            env=own | dict((environments or {}).get(node, {})),
        )
        for node, name in enumerate(names)
    ]
    try:
        answers = [process.communicate(timeout=400)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    code = processes[0].returncode
    assert code is not None
    return code, json.loads(answers[0])


def named(answer: dict[str, Any], code: str) -> dict[str, Any]:
    return next(each for each in answer["checks"] if each["code"] == code)


def test_healthy_nodes_pass(machines: list[str]) -> None:
    _, answer = run_checks(machines)
    assert named(answer, "H018")["status"] in ("pass", "warn"), named(answer, "H018")
    assert not named(answer, "H018")["evidence"].get("culprits")
    assert named(answer, "H012")["status"] == "pass"
    assert answer["nodes"].keys() == {"1", "2", "3"}


@pytest.mark.parametrize("bad", [0, 2])
def test_the_node_with_the_slow_link_is_named(machines: list[str], bad: int) -> None:
    name, slow = machines[bad], "root tbf rate 100mbit burst 256kb latency 400ms"
    run(f"tc qdisc add dev {name}w {slow}")
    run(f"tc -n {name} qdisc add dev {name}e {slow}")
    code, answer = run_checks(machines)
    found = named(answer, "H018")
    print(found["what"])
    assert (code, found["status"]) == (2, "fail"), found
    assert [each.partition("(")[2] for each in found["evidence"]["culprits"]] == [f"node {bad})"]
    assert f"leave {found['evidence']['culprits'][0]} out" in found["fix"]


def test_a_node_that_cannot_reach_the_others_is_named(machines: list[str]) -> None:
    # It still reaches the rendezvous, so that it takes part; only the messages between nodes are lost.
    for other in ("10.79.0.2", "10.79.0.3"):
        run(f"ip -n {machines[3]} route add blackhole {other}/32")
    run(f"ip -n {machines[3]} route add 10.79.0.1/32 dev {machines[3]}e")
    _, answer = run_checks(machines)
    found = named(answer, "H018")
    assert found["status"] == "fail", found
    assert "(node 3)" in found["what"]
    assert "does not answer" in found["what"]


def test_a_wrong_clock_is_reported(machines: list[str]) -> None:
    skewed = {"PYTHONPATH": str(Path(__file__).parent / "skewed"), "SKEW_SECONDS": "-30"}
    code, answer = run_checks(machines[:2], {1: skewed})
    found = named(answer, "H012")
    assert (code, found["status"]) == (2, "fail"), found
    assert "(node 1) is" in found["what"]
    assert -41 < found["evidence"]["skews"]["1"] < -29  # this clock also jumps, by ten seconds
