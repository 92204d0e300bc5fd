"""The relay of a node: its ranks' requests reach the coordinator in few messages, and nothing else changes for them."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist
from benchmarks.control_plane_clients import Client, Loop, SimulatedRank

from trimaran.launch import MAX_KEYS, MAX_SET_BYTES, Channel, RelayAnswers, StoreRelay
from trimaran.runs import MAX_FRAME_BYTES, ChannelClient, Record, WireError, frame, pack
from trimaran.train import TokenStore

TOKEN = "a token of a test"
ADDRESS = "0//cpu//0/3"  # a key that is written once
NUM_NODES, RANKS_PER_NODE = 16, 8
MAX_CALLS_PER_REQUEST = 35  # of functions, by the coordinator for a request of a rank; see the test that uses it


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def coordinator() -> Iterator[Channel]:
    made = Channel("127.0.0.1", TOKEN)
    yield made
    made.close()


@pytest.fixture
def node(coordinator: Channel) -> Iterator[Channel]:
    """A channel that relays to the coordinator."""
    made = Channel("127.0.0.1", TOKEN)
    made.relay_to(ChannelClient(coordinator.address, TOKEN, seconds=5.0), attempt=0)
    yield made
    made.close()


def store_at(channel: Channel, *, attempt: int = 0) -> TokenStore:
    return TokenStore(channel.address, TOKEN, attempt=attempt, timeout=timedelta(seconds=5))


def test_the_store_behaves_like_torchs_own_through_a_relay(coordinator: Channel, node: Channel) -> None:
    theirs = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))
    answers = []
    stores: list[Any] = [dist.PrefixStore(name, each) for name in ("p", "//cpu//") for each in (store_at(node), theirs)]
    for one in stores:
        one.set("bytes", bytes(range(256)))
        one.multi_set(["a", "b"], ["1", "2"])
        one.append("a", "x")
        answers.append([
            one.get("bytes"), one.multi_get(["a", "b"]), one.add("n", 3), one.add("n", -1), one.get("n"),
            one.check(["a", "b"]), one.check(["a", "c"]), one.compare_set("c", "", "new"),
            one.compare_set("c", "old", "newer"), one.compare_set("c", "new", "newest"), one.get("c"),
            one.compare_set("nowhere", "old", "new"), one.delete_key("c"), one.delete_key("c"),
            one.check(["nowhere"]), one.wait(["a", "b"], timedelta(seconds=1)), one.has_extended_api(),
        ])  # fmt: skip
    assert answers[0] == answers[1]
    assert answers[2] == answers[3]
    assert store_at(node).num_keys() == store_at(coordinator).num_keys() == 8


def test_ranks_of_two_nodes_and_of_the_coordinator_see_the_same_values(coordinator: Channel, node: Channel) -> None:
    other = Channel("127.0.0.1", TOKEN)
    other.relay_to(ChannelClient(coordinator.address, TOKEN, seconds=5.0), attempt=0)
    stores = [store_at(each) for each in (coordinator, node, other)]
    got: list[list[bytes]] = []
    waiters = [
        threading.Thread(target=lambda store=each: got.append(store.multi_get(["x", ADDRESS]))) for each in stores
    ]
    for each in waiters:
        each.start()
    stores[1].set(ADDRESS, "address")
    time.sleep(0.1)
    assert not got
    stores[2].set("x", "1")
    for each in waiters:
        each.join(60.0)
    assert got == [[b"1", b"address"]] * 3
    other.close()


def test_a_wait_through_a_relay_times_out_and_an_attempt_that_is_over_answers_nothing(
    coordinator: Channel, node: Channel
) -> None:
    store = store_at(node)
    with pytest.raises(dist.DistStoreError, match="missing-key"):
        store.wait(["missing-key"], timedelta(seconds=0.2))
    with pytest.raises(dist.DistStoreError, match="over"):
        store_at(node, attempt=1).get("x")
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            store.get("never")
        except dist.DistStoreError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.1)
    coordinator.end_attempt(0)
    waiter.join(60.0)
    assert "over" in str(errors)


def test_a_broken_connection_to_the_coordinator_ends_those_of_the_ranks(coordinator: Channel, node: Channel) -> None:
    """What they have set may not have arrived, so that no later request may be answered as if it had."""
    idle, waiting = store_at(node), store_at(node)
    idle.set(ADDRESS, "address")
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            waiting.get("never")
        except dist.DistNetworkError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    until(lambda: not coordinator.is_idle)
    coordinator.close()
    waiter.join(60.0)
    assert len(errors) == 1
    for store in (idle, store_at(node)):
        with pytest.raises(dist.DistNetworkError, match="does not answer"):
            store.get(ADDRESS)


def test_a_node_that_becomes_the_coordinator_answers_itself(coordinator: Channel, node: Channel) -> None:
    store_at(node).set("x", "of the coordinator before")
    node.end_relay()
    store = store_at(node, attempt=1)
    store.set("x", "1")
    assert (store.get("x"), store.num_keys(), coordinator.num_refused) == (b"1", 1, 0)


def test_a_rank_that_is_gone_leaves_nothing_and_disturbs_no_other(coordinator: Channel, node: Channel) -> None:
    with ChannelClient(node.address, TOKEN, seconds=5.0) as killed, pytest.raises(TimeoutError):
        killed.request({"op": "get", "attempt": 0, "keys": ["late"], "seconds": 60}, seconds=0.2)
    store = store_at(node)
    store.set("late", "x")
    assert store.get("late") == b"x"
    assert coordinator.is_idle


@pytest.mark.parametrize(
    "request_of_rank",
    [
        {"op": "format", "keys": ["k"]},
        {"op": "get", "keys": [1], "seconds": 1},
        {"op": "get", "keys": None, "seconds": 1},
        {"op": "set", "keys": [ADDRESS], "values": ["not base64!"]},
        {"op": "set", "keys": [ADDRESS, ADDRESS], "values": ["eA=="]},
    ],
)
def test_a_malformed_request_of_one_rank_fails_alone(
    coordinator: Channel, node: Channel, request_of_rank: Record
) -> None:
    store = store_at(node)
    store.set("k", "v")
    # It gets an error, or its connection is closed.
    with ChannelClient(node.address, TOKEN, seconds=5.0) as client, suppress(WireError):
        assert "error" in client.request(request_of_rank | {"attempt": 0}, seconds=5.0)
    assert store.get("k") == b"v"
    assert coordinator.num_refused == 0


def test_answers_that_are_together_longer_than_a_message_are_sent_in_several() -> None:
    def send(message: Record) -> None:
        frame(message)  # raises if it is too long
        sent.append(message)

    sent: list[Record] = []
    unsent: set[RelayAnswers] = set()
    relay, value = RelayAnswers(send, unsent), "x" * (MAX_FRAME_BYTES // 2)
    for number in range(2):
        relay.reply(number, {"values": [value]})
    relay.reply(2, {"values": ["y" * MAX_FRAME_BYTES]})
    assert unsent == {relay}
    relay.flush()
    assert len(sent) > 2
    answers = [each for message in sent for each in message["answers"]]
    assert [number for number, _ in answers] == [0, 1, 2]
    assert [answer == {"values": [value]} for _, answer in answers] == [True, True, False]
    assert "too long" in answers[2][1]["error"]


@pytest.mark.slow
def test_values_that_are_together_longer_than_a_message_arrive(coordinator: Channel, node: Channel) -> None:
    data, stores = bytes(MAX_FRAME_BYTES // 3), [store_at(node) for _ in range(4)]
    got: list[bytes] = []

    def set_and_get(store: TokenStore, number: int) -> None:
        store.set(f"big{number}", data)
        got.append(store.get(f"big{(number + 1) % len(stores)}"))

    threads = [threading.Thread(target=set_and_get, args=(store, each)) for each, store in enumerate(stores)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(120.0)
    assert got == [data] * len(stores)


def test_a_request_that_is_too_long_with_what_the_relay_adds_is_an_error_for_its_rank() -> None:
    def send(message: Record) -> None:
        if len(str(message)) > 1000:
            raise WireError("a message of 1001 bytes is too long")
        sent.append(message)

    sent: list[Record] = []
    answers: list[Record] = []
    relay = StoreRelay(0, send)
    for key in ("short", "l" * 1000, "other"):
        relay.answer({"op": "check", "attempt": 0, "keys": [key]}, answers.append)
    relay.flush()
    assert answers == [{"error": "a message of 1001 bytes is too long"}]
    assert [[each["keys"] for _, each in message["requests"]] for message in sent] == [[["short"]], [["other"]]]


def test_sets_that_are_answered_at_once_fit_into_one_message() -> None:
    """However many there are: the relay cannot tell a rank any more that its value was too long."""
    sent: list[Record] = []
    relay = StoreRelay(0, sent.append)
    value = pack(bytes(MAX_SET_BYTES - 100))
    for number in range(3 * MAX_KEYS):
        relay.answer({"op": "set", "attempt": 0, "keys": [f"//cpu//{number}"], "values": [value]}, lambda answer: None)
    relay.flush()
    ((_, requests),) = [(each, each["requests"]) for each in sent]
    assert [len(each["keys"]) for _, each in requests] == [MAX_KEYS] * 3
    assert MAX_KEYS * (len(value) + MAX_SET_BYTES) < MAX_FRAME_BYTES  # the longest values, or the longest keys


def test_while_a_message_is_on_its_way_requests_are_collected_for_the_next() -> None:
    sent: list[Record] = []
    answers: list[Record] = []
    relay = StoreRelay(7, sent.append)

    def ask(op: str, *keys: str, **fields: Any) -> None:
        relay.answer({"op": op, "attempt": 7, "keys": [*keys], **fields}, answers.append)
        relay.flush()

    ask("add", "n", amount=1)
    ask("set", "//cpu//0", values=["eA=="])
    ask("set", "//cpu//1", values=["eQ=="])
    assert (len(sent), answers) == (1, [{}, {}])  # sets of keys that are written once are answered at once
    ask("get", "//cpu//1", seconds=5)
    assert answers[2:] == [{"values": ["eQ=="]}]
    ask("get", "//cpu//9", seconds=5)
    ask("get", "//cpu//9", seconds=5)  # of another rank
    ask("get", "//cpu//9", seconds=6)
    relay.receive({"taken": 1, "answers": [[0, {"amount": 1}]]})
    relay.flush()
    assert answers[3:] == [{"amount": 1}]
    assert [request for _, request in sent[1]["requests"]] == [
        {"op": "set", "keys": ["//cpu//0", "//cpu//1"], "values": ["eA==", "eQ=="]},
        {"op": "get", "keys": ["//cpu//9"], "seconds": 5},
        {"op": "get", "keys": ["//cpu//9"], "seconds": 6},
    ]
    numbers = [number for number, _ in sent[1]["requests"]]
    relay.receive({"taken": 1, "answers": [[numbers[1], {"values": ["eg=="]}]]})
    assert answers[4:] == [{"values": ["eg=="]}] * 2
    ask("get", "//cpu//9", seconds=5)
    assert len(sent) == 3  # another node's value is asked for again


class SimulatedNodes:
    """The ranks of many nodes that join through their relays, over real connections to `coordinator`."""

    def __init__(self, coordinator: Channel, num_nodes: int) -> None:
        self.loop, self.num_joined = Loop(TOKEN), 0
        self._spec = {"attempt": 0, "world_size": num_nodes * RANKS_PER_NODE, "store": coordinator.address}
        for node in range(num_nodes):
            self._connect(node)

    def note_event(self, rank: int, kind: str, attempt: int) -> None:
        self.num_joined += 1

    def _connect(self, node: int) -> None:
        def answered(answer: Record | None) -> None:
            if answer is None:
                here: Any = type("Here", (), {"fleet": self})
                ranks = range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE)
                self.ranks = [SimulatedRank(here, rank, self._spec, relay) for rank in ranks]
            else:
                relay.receive(answer)
                self.loop.relays.add(relay)

        client = Client(self.loop, self._spec["store"], answered, lambda: pytest.fail("a connection was lost"))
        relay = StoreRelay(0, client.send)

    def join(self) -> Counter[str]:
        """Return how many messages and requests there were until all ranks have joined."""
        until_time = time.monotonic() + 60.0
        while self.num_joined < self._spec["world_size"]:
            assert time.monotonic() < until_time
            self.loop.turn()
        return self.loop.counts


def test_ranks_join_with_few_messages_and_little_work_for_the_coordinator() -> None:
    """Counted, not timed. A coordinator that is slower gets fewer and longer messages, so that the bounds hold.

    Without relays each request is a message, and takes the coordinator about 110 calls of functions.
    """
    calls = Counter[str]()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        calls["all"] += event in ("call", "c_call")

    threading.setprofile(count)  # of threads that are started from now on: that of the channel
    try:
        channel = Channel("127.0.0.1", TOKEN)
    finally:
        threading.setprofile(None)
    counts = SimulatedNodes(channel, NUM_NODES).join()
    channel.close()
    assert sys.getprofile() is None
    requests = counts["requests of ranks"]
    assert set(counts) == {"relay", "requests of ranks"}
    # A node sends fewer messages than one of its ranks has requests.
    assert counts["relay"] / NUM_NODES <= requests / (NUM_NODES * RANKS_PER_NODE)
    assert calls["all"] / requests <= MAX_CALLS_PER_REQUEST
