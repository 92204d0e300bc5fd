"""Nodes without a shared disk: the head's answers, the token, and the files that nodes send to the head."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fault.harness import lines
from tests.runs import new_run, start_ranks
from tests.unit.test_launch_nodes import parse
from trimaran.core import UserError
from trimaran.launch import (
    RUN_FILES,
    Channel,
    FileReceiver,
    FileSender,
    HeadClient,
    NodeOptions,
    Signals,
    answer_nodes,
    answer_not_ready,
    create_as_head_has_it,
    given_token,
    keep_token,
    needed_token,
    read_received,
    split_head,
    write_run_files,
)
from trimaran.runs import RunDirectory, WireError, new_token, pack, run_token, take_lease


@pytest.fixture
def head(tmp_path: Path) -> RunDirectory:
    return new_run(tmp_path / "head")


@pytest.fixture
def channel(head: RunDirectory) -> Iterator[Channel]:
    made = Channel("127.0.0.1", run_token(head))
    made.operations[RUN_FILES] = answer_not_ready
    yield made
    made.close()


@contextmanager
def coordinating(head: RunDirectory, channel: Channel) -> Iterator[None]:
    with take_lease(head, address=channel.address) as lease:
        channel.operations[RUN_FILES] = partial(answer_nodes, head, lease.holder)
        yield


def test_a_node_creates_its_run_directory_as_the_head_has_it(
    head: RunDirectory, channel: Channel, tmp_path: Path
) -> None:
    client = HeadClient(channel.address, run_token(head), "b")
    assert client.ask(Signals(), seconds=0.0) is None, "the head does not hold the lease yet"
    with coordinating(head, channel):
        answer = client.ask(Signals(), seconds=5.0)
    assert answer is not None
    made = create_as_head_has_it(tmp_path / "disk" / "run", answer)
    assert made.read_recipe() == head.read_recipe()
    assert made.read_plan() == head.read_plan()
    assert [each.name for each in made.path.parent.iterdir()] == ["run"]
    assert create_as_head_has_it(made.path, answer) == made
    with pytest.raises(UserError, match=r"L022: .*the disk is shared"):
        create_as_head_has_it(head.path, answer)
    write_run_files(made, {"recipe": answer.recipe.replace("seq_len: 256", "seq_len: 512"), "plan": answer.plan})
    with pytest.raises(UserError, match=r"L024: .*data\.seq_len"):
        create_as_head_has_it(made.path, answer)


def test_a_node_with_another_token_is_refused(head: RunDirectory, channel: Channel) -> None:
    with coordinating(head, channel), pytest.raises(UserError, match="L023"):
        HeadClient(channel.address, new_token(), "b").ask(Signals(), seconds=5.0)


def test_a_request_that_the_head_cannot_answer_does_not_end_its_channel(head: RunDirectory, channel: Channel) -> None:
    client = HeadClient(channel.address, run_token(head), "b")
    with coordinating(head, channel):
        head.plan.rename(head.path / "elsewhere")
        assert client.ask(Signals(), seconds=0.0) is None
        (head.path / "elsewhere").rename(head.plan)
        assert client.ask(Signals(), seconds=5.0) is not None


def test_the_token_comes_from_the_environment_or_a_file_that_the_head_creates(tmp_path: Path) -> None:
    environment: dict[str, str] = {"TRIMARAN_RUN_TOKEN": "x" * 20}
    file = tmp_path / "token"
    assert given_token(environment, None, is_head=False) == "x" * 20
    assert environment == {}
    made = given_token({}, file, is_head=True)
    assert len(made) > 30
    assert file.stat().st_mode & 0o777 == 0o600
    assert given_token({}, file, is_head=False) == made
    file.chmod(0o644)
    with pytest.raises(UserError, match="L023: other users"):
        given_token({}, file, is_head=False)
    with pytest.raises(UserError, match=r"L023: .*shorter"):
        given_token({"TRIMARAN_RUN_TOKEN": "x"}, None, is_head=True)


def test_a_node_keeps_the_token_for_the_next_start(head: RunDirectory) -> None:
    assert given_token({}, None, is_head=True) == ""
    with pytest.raises(UserError, match="L023: this node has no token"):
        needed_token("", head)
    for token in ("y" * 20, "z" * 20):
        keep_token(head, token)
        assert needed_token("", head) == run_token(head) == token


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("node-a", ("node-a", 29400)),
        ("node-a:4000", ("node-a", 4000)),
        ("10.0.0.5:4000", ("10.0.0.5", 4000)),
        ("fd00::5", ("fd00::5", 29400)),
        ("[fd00::5]:4000", ("fd00::5", 4000)),
    ],
)
def test_a_head_is_a_host_and_perhaps_a_port(text: str, parts: tuple[str, int]) -> None:
    assert split_head(text) == parts


@pytest.mark.parametrize("text", ["", ":4000", "node-a:99999", "node-a:http", "[fd00::5"])
def test_another_head_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="L022"):
        split_head(text)


def test_own_disks_need_a_head_and_the_node_that_has_its_address_is_it() -> None:
    with pytest.raises(UserError, match="L022"):
        parse("--nodes", "2", "--own-disk")
    options: dict[str, Any] = {"nodes": 2, "min_nodes": 2, "own_disk": True, "head": "127.0.0.1:4000"}
    first, second = (NodeOptions(**options, address=address) for address in ("127.0.0.1", "127.0.0.2"))
    assert (first.is_head, second.is_head) == (True, False)
    assert first.head_address == "127.0.0.1:4000"
    by_name = NodeOptions(**options | {"head": "localhost"}, address="10.0.0.5")
    assert by_name.is_head, "a machine may know its own name as a loopback address"


def stream(sender: FileSender, receiver: FileReceiver) -> int:
    """Send everything; return the number of pieces."""
    count = 0
    while pieces := json.loads(json.dumps(sender.pieces())):
        receiver.write(pieces)
        count += len(pieces)
    return count


def test_the_head_gets_every_line_once_over_all_connections(head: RunDirectory, tmp_path: Path) -> None:
    node = new_run(tmp_path / "node")
    start_ranks(node)
    node.log(1).write_text("one\ntwo")
    (node.path / "incidents" / "3").mkdir(parents=True)
    (node.path / "incidents" / "3" / "rank-1.json").write_text('{"no": "newline"}')
    sender, receiver = FileSender(node, {}), FileReceiver(head, "b")
    stream(sender, receiver)
    assert head.events(1).read_bytes() == node.events(1).read_bytes()
    assert head.log(1).read_text() == "one\n"
    assert (head.path / "incidents" / "3" / "rank-1.json").read_text() == '{"no": "newline"}'
    with node.log(1).open("a") as log:
        log.write(" and a half\nthree\n")
    lost = sender.pieces()  # the connection broke: the head may have got them or not
    receiver.write(lost)
    again = FileSender(node, read_received(head, "b"))
    assert again.pieces() == []
    FileReceiver(head, "b").write(lost)
    assert head.log(1).read_text() == node.log(1).read_text()
    assert lines(head.events(1)) == lines(node.events(1))


def test_files_are_sent_in_bounded_pieces_of_whole_lines(head: RunDirectory, tmp_path: Path) -> None:
    node = new_run(tmp_path / "node")
    node.log(1).write_text("".join(f"line {number}\n" for number in range(100)) + 80 * "x")
    sender, receiver = FileSender(node, {}, piece_bytes=64, max_line_bytes=32), FileReceiver(head, "b")
    first = sender.pieces(limit_bytes=100)
    assert len(first) == 2
    receiver.write(first)
    assert head.log(1).read_text().endswith("\n")
    assert stream(sender, receiver) > 5
    assert head.log(1).read_text() == node.log(1).read_text()[:-16], "a long line is sent without its end"
    receiver.write(sender.pieces(is_last=True))
    assert head.log(1).read_text() == node.log(1).read_text()


@pytest.mark.parametrize("name", ["../x", "recipe.yaml", "lease/token", "events/../lease/token", "/etc/passwd",
                                  "incidents/../plan.json", "incidents/a/../../plan.json"])  # fmt: skip
def test_a_node_can_write_no_other_file_of_the_head(head: RunDirectory, name: str) -> None:
    before = sorted(head.path.rglob("*"))
    with pytest.raises(WireError):
        FileReceiver(head, "b").write([{"name": name, "offset": 0, "data": pack(b"x")}])
    assert sorted(head.path.rglob("*")) == before


def test_a_linked_file_is_not_followed(head: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    node = new_run(tmp_path / "node")
    os.symlink(tmp_path / "secret", node.log(1))
    assert FileSender(node, {}).pieces() == []
    os.symlink(tmp_path / "secret", head.log(1))
    FileReceiver(head, "b").write([{"name": "logs/rank-1.log", "offset": 0, "data": pack(b"x")}])
    assert (tmp_path / "secret").read_text() == "s"


def test_what_was_received_is_forgotten_if_its_record_is_damaged(head: RunDirectory) -> None:
    assert read_received(head, "b") == {}
    (head.path / "nodes").mkdir()
    for text in ("{", "[]", '{"logs/rank-1.log": -1}', '{"logs/rank-1.log": "x"}'):
        (head.path / "nodes" / "b.json").write_text(text)
        assert read_received(head, "b") == {}
    assert read_received(head, "../../x") == {}
