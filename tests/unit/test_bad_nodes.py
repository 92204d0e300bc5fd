"""The bad-node memory: what makes a node bad, what does not, and how it is forgotten."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs import new_run
from trimaran.app import main
from trimaran.core import UserError
from trimaran.launch import NodeLost, note_lost_nodes, note_unfit_node
from trimaran.runs import MIN_LOSSES, VARIABLE, add_observation, bad_nodes_file, observe, read_bad_nodes


class NamedNode:
    """The part of a node that is noted."""

    def __init__(self, name: str, host: str = "") -> None:
        self.name, self.num_ranks = name, 1
        if host:
            self.host = host


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "state" / "bad.jsonl"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def nodes_of(*hosts: str) -> list:
    return [NamedNode("leader"), *(NamedNode(f"{host}-10.0.0.1", host) for host in hosts)]


def test_a_broken_part_makes_a_node_bad_and_a_persons_mistake_does_not(memory: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    note_unfit_node(run, "n1", UserError("H003", "GPU 3 has 2 uncorrectable errors", where="node n1", fix="replace it"))
    for code in ("H001", "H002", "H007", "H010", "H014"):
        note_unfit_node(run, "n2", UserError(code, "a mistake", where="node n2", fix="fix it"))
    bad = read_bad_nodes(memory)
    assert [*bad] == ["n1"]
    assert "H003" in bad["n1"].why
    assert bad["n1"].observations[0].run == str(run.location)


def test_only_repeated_losses_make_a_node_bad(memory: Path, tmp_path: Path) -> None:
    """A single loss may be a preemption, and many at once are the network's or the scheduler's doing."""
    run, nodes = new_run(tmp_path / "run"), nodes_of("a", "b", "c")
    lost = NodeLost(node="a-10.0.0.1", what="its supervisor is gone")
    for number in range(MIN_LOSSES):
        assert read_bad_nodes(memory) == {}
        note_lost_nodes(run, nodes, [lost], incident=f"i-{number:04d}")
    assert read_bad_nodes(memory)["a"].observations[-1].incident == "i-0002"
    all_of_them = [replace(lost, node=f"{host}-10.0.0.1") for host in "abc"]
    fork_server = NodeLost(node="leader", what="the fork server was killed")
    for _ in range(2 * MIN_LOSSES):
        note_lost_nodes(run, nodes, all_of_them, incident="i-0009")
        note_lost_nodes(run, nodes, [fork_server], incident="i-0010")
    assert [*read_bad_nodes(memory)] == ["a"]


def test_a_bad_node_is_forgotten_in_time_or_by_a_person(memory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = observe("old", "hardware", "GPU 0 is gone")
    add_observation(memory, replace(old, expires=time.time() - 1))
    add_observation(memory, observe("n1", "hardware", "GPU 0 is gone", run="/runs/x", incident="i-0001"))
    assert main(["doctor", "--bad-nodes", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [each["node"] for each in shown["nodes"]] == ["n1"]
    assert main(["doctor", "--bad-nodes"]) == 0
    assert "GPU 0 is gone; /runs/x i-0001" in capsys.readouterr().out
    assert main(["doctor", "--forget-node", "n2"]) == 2
    assert "L080" in capsys.readouterr().err
    assert main(["doctor", "--forget-node", "n1"]) == 0
    assert read_bad_nodes(memory) == {}


def test_a_damaged_or_hostile_file_names_no_node(memory: Path) -> None:
    add_observation(memory, observe("good-line", "hardware", "broken"))
    hostile = [observe(name, "hardware", "x") for name in ("--wrap=id", "a,b", "a b", "x\n--exclude=all", "", "é" * 3)]
    for each in hostile:
        add_observation(memory, each)
    with memory.open("ab") as file:
        file.write(b'{"node": 3}\n[]\nnot json\n{"node": "cut')
    add_observation(memory, observe("after", "hardware", "broken"))
    assert [*read_bad_nodes(memory)] == ["after", "good-line"]
    memory.unlink()
    memory.mkdir()
    assert read_bad_nodes(memory) == {}


def test_two_processes_write_at_once_and_no_line_is_lost(memory: Path) -> None:
    children = []
    for child in range(2):
        if not (pid := os.fork()):
            for number in range(50):
                add_observation(memory, observe(f"n{child}-{number}", "hardware", "x" * 400))
            os._exit(0)
        children.append(pid)
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
    assert len(read_bad_nodes(memory)) == 100


def test_the_file_is_in_the_users_state_folder() -> None:
    assert bad_nodes_file({"HOME": "/home/a"}) == Path("/home/a/.local/state/trimaran/bad-nodes.jsonl")
    assert bad_nodes_file({"HOME": "/home/a", "XDG_STATE_HOME": "/s"}) == Path("/s/trimaran/bad-nodes.jsonl")
    assert bad_nodes_file({VARIABLE: "/site/bad.jsonl"}) == Path("/site/bad.jsonl")
