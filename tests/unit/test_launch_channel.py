"""The supervisor's channel: a torch store for clients with the token, and nothing for others."""

import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from trimaran.core import UserError
from trimaran.launch import EXCHANGE_SECONDS, MAX_UNAUTHENTICATED, SILENT_SECONDS, Channel
from trimaran.runs import (
    ChannelClient,
    FrameAuthenticator,
    FrameReader,
    RefusedError,
    WireError,
    fingerprint,
    frame,
    proof,
    split_address,
)
from trimaran.train import TokenStore

TOKEN = "a token of a test"


@pytest.fixture
def channel() -> Iterator[Channel]:
    made = Channel("127.0.0.1", TOKEN)
    yield made
    made.close()


@pytest.fixture
def store(channel: Channel) -> TokenStore:
    return TokenStore(channel.address, TOKEN, attempt=0, timeout=timedelta(seconds=5))


def connect(channel: Channel) -> socket.socket:
    return socket.create_connection(split_address(channel.address), timeout=60.0)


def receive(client: socket.socket, reader: FrameReader) -> Any:
    """Return the next frame."""
    while (record := reader.next()) is None:
        reader.feed(client.recv(4096))
    return record


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def receive_all(client: socket.socket) -> bytes:
    """Return everything received until the other side closes the connection."""
    received = b""
    try:
        while data := client.recv(4096):
            received += data
    except ConnectionResetError:
        pass
    return received


def test_the_store_behaves_like_torchs_own(store: TokenStore) -> None:
    """The same calls on both, through the prefix store that torch uses."""
    theirs = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))
    stores: list[Any] = [dist.PrefixStore("p", store), dist.PrefixStore("p", theirs)]
    answers = []
    for one in stores:
        one.set("bytes", bytes(range(256)))
        one.multi_set(["a", "b"], ["1", "2"])
        one.append("a", "x")
        answers.append([
            one.get("bytes"), one.multi_get(["a", "b"]), one.add("n", 3), one.add("n", -1), one.get("n"),
            one.check(["a", "b"]), one.check(["a", "c"]), one.compare_set("c", "", "new"),
            one.compare_set("c", "old", "newer"), one.compare_set("c", "new", "newest"),
            one.compare_set("nowhere", "old", "new"), one.delete_key("c"), one.delete_key("c"),
            one.check(["nowhere"]), one.wait(["a", "b"], timedelta(seconds=1)), one.has_extended_api(),
        ])  # fmt: skip
    assert answers[0] == answers[1]


def test_a_wait_ends_with_the_last_key_and_does_not_block_other_threads(store: TokenStore) -> None:
    got: list[list[bytes]] = []
    waiter = threading.Thread(target=lambda: got.append(store.multi_get(["x", "y"])))
    waiter.start()
    store.set("x", "1")
    time.sleep(0.1)
    assert not got
    store.set("y", "2")
    waiter.join(60.0)
    assert got == [[b"1", b"2"]]


def test_a_wait_that_times_out_names_the_missing_key(store: TokenStore) -> None:
    store.set("there", "1")
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="missing-key"):
        store.wait(["there", "missing-key"], timedelta(seconds=0.3))
    assert 0.3 <= time.monotonic() - began < 20.0


def test_an_attempt_that_is_over_accepts_no_requests(channel: Channel, store: TokenStore) -> None:
    store.set("address", "old")
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            store.get("never")
        except dist.DistStoreError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.1)
    channel.end_attempt(0)
    waiter.join(60.0)
    assert "over" in str(errors)
    with pytest.raises(dist.DistStoreError, match="over"):
        store.set("address", "new")
    assert TokenStore(channel.address, TOKEN, attempt=1).num_keys() == 0


def test_large_values_and_many_keys_work(store: TokenStore) -> None:
    data = secrets.token_bytes(2 * 2**20)
    store.set("big", data)
    assert store.get("big") == data
    store.multi_set([f"k{each}" for each in range(2000)], ["v"] * 2000)
    assert store.num_keys() == 2001


def test_a_store_of_another_run_is_refused_by_name(channel: Channel) -> None:
    with pytest.raises(UserError, match=r"S023: the supervisor here belongs to another run, [0-9a-f]{12}"):
        TokenStore(channel.address, "the token of another run", attempt=0).get("x")


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        os.urandom(4096),
        struct.pack("!I", 2**31) + b"x" * 100,
        struct.pack("!I", 5) + b"[1,2]",
        struct.pack("!I", 4000) + b"[" * 4000,
        frame({"op": "set", "attempt": 0, "keys": ["k"], "values": ["eA=="]}),
        frame({"nonce": "n", "proof": "0" * 64}),
        frame({"nonce": ["n"], "proof": {"a": 1}}),
    ],
)
def test_a_client_without_the_token_is_disconnected_and_counted(
    channel: Channel, store: TokenStore, data: bytes
) -> None:
    store.set("k", "ours")
    with connect(channel) as client:
        client.sendall(data)
        assert TOKEN.encode() not in receive_all(client)
    until(lambda: sum(channel.refused.values()) == 1)
    assert (store.get("k"), store.num_keys()) == (b"ours", 1)


def test_a_client_that_sends_an_incomplete_frame_is_disconnected_in_time() -> None:
    channel = Channel("127.0.0.1", TOKEN, authentication_seconds=0.05)
    with connect(channel) as client:
        client.sendall(b"\0\0")
        receive_all(client)
    assert channel.refused["timeout"] == 1
    channel.close()


def test_a_thousand_idle_connections_do_not_disturb(channel: Channel, store: TokenStore) -> None:
    store.set("k", "v")
    idle = [connect(channel) for _ in range(MAX_UNAUTHENTICATED + 200)]
    until(lambda: channel.num_unauthenticated <= MAX_UNAUTHENTICATED)
    began = time.monotonic()
    for _ in range(50):
        assert store.get("k") == b"v"
    newcomer = TokenStore(channel.address, TOKEN, attempt=0)
    assert newcomer.get("k") == b"v"
    assert time.monotonic() - began < 20.0
    for each in idle:
        each.close()
    assert channel.refused["overload"] >= 200


def test_a_thousand_ranks_that_connect_at_once_are_all_served(channel: Channel) -> None:
    """All connections are open before the first one proves the token."""
    sockets = [connect(channel) for _ in range(1000)]
    readers = [FrameReader() for _ in sockets]
    for number, (client, reader) in enumerate(zip(sockets, readers, strict=True)):
        hello = receive(client, reader)
        client.sendall(frame({"nonce": f"{number}", "proof": proof(TOKEN, "client", hello["nonce"], f"{number}")}))
    for client, reader in zip(sockets, readers, strict=True):
        assert "proof" in receive(client, reader)
        client.close()
    assert channel.num_refused == 0


def test_many_nodes_are_asked_to_write_less_often(channel: Channel) -> None:
    hello = {"op": "exchange", "session": "s", "messages": []}
    with ChannelClient(channel.address, TOKEN, seconds=5.0) as client:
        answers = [client.request(hello | {"node": f"n{number}"}, seconds=5.0) for number in range(1024)]
    assert answers[0] == {"messages": []}  # as before, for a few nodes
    assert EXCHANGE_SECONDS < answers[-1]["seconds"] < SILENT_SECONDS / 4


def test_many_requests_wait_end_and_time_out(channel: Channel, store: TokenStore) -> None:
    """Each is answered once: when its key is set, or when its time is up. What is over leaves no trace."""
    with ChannelClient(channel.address, TOKEN, seconds=5.0) as client:
        for number in range(50):
            store.set(f"k{number}", "v")
            wait = {"op": "wait", "attempt": 0, "keys": [f"k{number}", "never"], "seconds": 0.001}
            assert client.request(wait, seconds=5.0) == {"error": "timeout", "missing": ["never"]}
        assert channel.is_idle
        waiters = [ChannelClient(channel.address, TOKEN, seconds=5.0).detach() for _ in range(20)]
        for sock, _, authenticator in waiters[10:]:
            sock.sendall(frame({"op": "get", "attempt": 0, "keys": ["late"], "seconds": 60}, authenticator))
        until(lambda: not channel.is_idle)
        for sock, *_ in waiters[:15]:
            sock.close()
        store.set("late", "x")
        assert [receive(sock, reader) for sock, reader, _ in waiters[15:]] == [{"values": ["eA=="]}] * 5
    until(lambda: channel.is_idle)
    for sock, *_ in waiters[15:]:
        sock.close()


def test_gloo_gets_an_address_with_the_answer_to_its_wait(channel: Channel, store: TokenStore) -> None:
    """Only for keys that are written once: others are asked for again."""
    store.multi_set(["0//cpu//0/1", "counter"], ["address", "1"])
    store.wait(["0//cpu//0/1"])
    store.wait(["counter"], timedelta(seconds=1))
    TokenStore(channel.address, TOKEN, attempt=0).multi_set(["0//cpu//0/1", "counter"], ["another", "2"])
    assert (store.get("0//cpu//0/1"), store.get("counter")) == (b"address", b"2")
    assert store.get("0//cpu//0/1") == b"another"


def test_a_frame_that_was_changed_in_transit_closes_the_connection(channel: Channel, store: TokenStore) -> None:
    """A client with the token connects, and its frame is changed on the way."""
    store.set("k", "ours")
    reader = FrameReader()
    with connect(channel) as client:
        hello = receive(client, reader)
        client.sendall(frame({"nonce": "n", "proof": proof(TOKEN, "client", hello["nonce"], "n")}))
        receive(client, reader)
        good = frame(
            {"op": "delete", "attempt": 0, "keys": ["x"]}, FrameAuthenticator(TOKEN, "client", hello["nonce"], "n")
        )
        client.sendall(good.replace(b'"x"', b'"k"'))
        assert receive_all(client) == b""
    assert store.get("k") == b"ours"
    assert channel.refused["malformed"] == 1


def test_a_server_without_the_token_is_refused() -> None:
    """It knows the fingerprint of the run, which is not secret."""
    with socket.create_server(("127.0.0.1", 0)) as fake:

        def serve() -> None:
            connection, _ = fake.accept()
            with connection:
                connection.sendall(frame({"run": fingerprint(TOKEN), "nonce": "n"}))
                connection.recv(4096)
                connection.sendall(frame({"proof": "0" * 64}))
                connection.recv(4096)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(RefusedError):
            ChannelClient(f"127.0.0.1:{fake.getsockname()[1]}", TOKEN, seconds=5.0)


def test_an_authenticated_client_with_malformed_requests_is_disconnected(channel: Channel) -> None:
    for request in ({"op": "format"}, {"op": "get", "attempt": 0, "keys": [1], "seconds": 1}, {"op": "add"}):
        with ChannelClient(channel.address, TOKEN, seconds=5.0) as client, pytest.raises(WireError):
            client.request(request, seconds=5.0)
    assert channel.refused["malformed"] == 3


def test_the_channel_listens_on_one_address_only(channel: Channel) -> None:
    host, port = split_address(channel.address)
    assert host == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=2.0)


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(UserError, match="S022"):
        Channel("203.0.113.7", TOKEN)


def test_a_port_is_free_again_after_close(channel: Channel) -> None:
    _, port = split_address(channel.address)
    channel.close()
    Channel("127.0.0.1", TOKEN, port=port).close()


def test_nodes_exchange_messages_with_the_coordinator(channel: Channel) -> None:
    hello = {"op": "exchange", "node": "b", "session": "s1", "messages": [{"num_ranks": 2}]}
    with ChannelClient(channel.address, TOKEN, seconds=5.0) as client:
        assert client.request(hello, seconds=5.0) == {"messages": []}
        mailbox = channel.mailboxes["b"]
        assert mailbox.inbox.popleft() == {"num_ranks": 2}
        mailbox.outbox.append({"command": "start"})
        assert client.request(hello | {"messages": []}, seconds=5.0) == {"messages": [{"command": "start"}]}
        with ChannelClient(channel.address, TOKEN, seconds=5.0) as second:
            assert "error" in second.request(hello | {"session": "s2"}, seconds=5.0)
        assert not mailbox.broken
    until(lambda: mailbox.broken, SILENT_SECONDS)
    with ChannelClient(channel.address, TOKEN, seconds=5.0) as client:
        assert client.request(hello | {"session": "s3"}, seconds=5.0) == {"messages": []}
    assert channel.mailboxes["b"] is not mailbox


def test_frames_are_json_and_never_contain_the_token(channel: Channel) -> None:
    """A relay records everything that is sent."""
    sent: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as relay:

        def pump(source: socket.socket, target: socket.socket) -> None:
            while data := source.recv(65536):
                sent.append(data)
                target.sendall(data)

        def serve() -> None:
            connection, _ = relay.accept()
            inner = connect(channel)
            threading.Thread(target=pump, args=(inner, connection), daemon=True).start()
            pump(connection, inner)

        threading.Thread(target=serve, daemon=True).start()
        store = TokenStore(f"127.0.0.1:{relay.getsockname()[1]}", TOKEN, attempt=0)
        store.set("k", "v")
        assert store.get("k") == b"v"
    assert TOKEN.encode() not in b"".join(sent)
    assert json.loads(sent[0][4:])["run"]
