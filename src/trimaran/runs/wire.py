"""Frames between the processes of a run: JSON with a length and a message authentication code (MAC).

Both sides prove that they know the run's token by answering the other's nonce; the token itself is never sent. Every
frame after that carries a MAC, made with a key of this one connection and a counter, so that frames cannot be inserted,
dropped or repeated on the way. Frames are not encrypted and carry no secrets.
"""

import base64
import hashlib
import hmac
import json
import secrets
import socket
import struct
from typing import Any, Literal, Self

Record = dict[str, Any]
Side = Literal["server", "client"]
MAX_UNAUTHENTICATED_BYTES = 4 * 2**10  # of one frame, before the token is proved
MAX_FRAME_BYTES = 16 * 2**20
LENGTH = struct.Struct("!I")
encode_json = json.JSONEncoder(separators=(",", ":")).encode
TAG_BYTES = 16
NONCE_BYTES = 32
WRITTEN_ONCE = "//cpu//"  # in the keys of gloo's addresses: a rank writes each once, others wait for it and then get it


class WireError(ConnectionError):
    """The other side sent something that breaks the protocol; the connection has to be closed."""


class RefusedError(WireError):
    """The other side does not know the token. `run` is the fingerprint of its run."""

    def __init__(self, run: str) -> None:
        super().__init__(f"run {run} does not know this token")
        self.run = run


def fingerprint(token: str) -> str:
    """Return a public name of the run with this token. The token cannot be derived from it."""
    return hashlib.sha256(f"trimaran run {token}".encode()).hexdigest()[:12]


def new_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def proof(token: str, side: Side, server_nonce: str, client_nonce: str) -> str:
    """Return the proof that `side` knows the token."""
    return hmac.digest(token.encode(), f"{side} {server_nonce} {client_nonce}".encode(), "sha256").hex()


def matches(received: Any, expected: str) -> bool:
    return isinstance(received, str) and hmac.compare_digest(received.encode(), expected.encode())


class FrameAuthenticator:
    """Makes the MACs of the frames of one side of a connection, in their order."""

    def __init__(self, token: str, side: Side, server_nonce: str, client_nonce: str) -> None:
        key = hmac.digest(token.encode(), f"frames of {side} {server_nonce} {client_nonce}".encode(), "sha256")
        self._begun = hmac.new(key, digestmod="sha256")  # a copy of it costs less than a new one for each frame
        self._count = 0

    def next_tag(self, payload: bytes | bytearray) -> bytes:
        """Return the MAC of the next frame."""
        self._count += 1
        mac = self._begun.copy()
        mac.update(self._count.to_bytes(8, "big") + payload)
        return mac.digest()[:TAG_BYTES]


def frame(record: Record, authenticator: FrameAuthenticator | None = None) -> bytes:
    """Return `record` as bytes to send. Raises if it is longer than any reader accepts."""
    payload = encode_json(record).encode()
    if len(payload) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(payload)} bytes is too long")
    return LENGTH.pack(len(payload)) + (authenticator.next_tag(payload) if authenticator else b"") + payload


class FrameReader:
    """Turns received bytes, in chunks of any size, into records. Only small frames until `authenticate_with`."""

    def __init__(self) -> None:
        self._authenticator: FrameAuthenticator | None = None
        self._limit = MAX_UNAUTHENTICATED_BYTES
        self._buffer = bytearray()

    def authenticate_with(self, authenticator: FrameAuthenticator) -> None:
        """Expect a MAC on every frame from now on, and accept long frames."""
        self._authenticator, self._limit = authenticator, MAX_FRAME_BYTES

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> Record | None:
        """Return the next complete record; None until more has arrived."""
        if len(self._buffer) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._buffer)
        if length > self._limit:
            raise WireError(f"a frame of {length} bytes; at most {self._limit} are allowed")
        begin = LENGTH.size + (TAG_BYTES if self._authenticator else 0)
        if len(self._buffer) < begin + length:
            return None
        payload = self._buffer[begin : begin + length]
        tag = self._buffer[LENGTH.size : begin]
        del self._buffer[: begin + length]
        if self._authenticator and not hmac.compare_digest(tag, self._authenticator.next_tag(payload)):
            raise WireError("a frame with a wrong MAC")
        try:
            record = json.loads(payload.decode())
        except (ValueError, RecursionError):
            raise WireError("a frame that is not JSON") from None
        if not isinstance(record, dict):
            raise WireError("a frame that is not a JSON object")
        return record


class ChannelClient:
    """A connection to a `launch.channel.Channel` for requests and answers. For one thread at a time."""

    def __init__(self, address: str, token: str, *, seconds: float) -> None:
        """Connect to `address`, `host:port`, and prove the token within `seconds`."""
        host, port = split_address(address)
        self._socket = socket.create_connection((host, port), timeout=seconds)
        self._reader = FrameReader()
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = self._read()
            run, theirs, ours = str(hello.get("run", "?")), str(hello.get("nonce", "")), new_nonce()
            if run != fingerprint(token):
                raise RefusedError(run)
            self._socket.sendall(frame({"nonce": ours, "proof": proof(token, "client", theirs, ours)}))
            if not matches(self._read().get("proof"), proof(token, "server", theirs, ours)):
                raise RefusedError(run)
            self._reader.authenticate_with(FrameAuthenticator(token, "server", theirs, ours))
            self._authenticator = FrameAuthenticator(token, "client", theirs, ours)
        except BaseException:
            self.close()
            raise

    def request(self, record: Record, *, seconds: float) -> Record:
        """Return the answer to `record`. After an error or a timeout the connection cannot be used any more."""
        self._socket.settimeout(seconds)
        self._socket.sendall(frame(record, self._authenticator))
        return self._read()

    def close(self) -> None:
        self._socket.close()

    def detach(self) -> tuple[socket.socket, FrameReader, FrameAuthenticator]:
        """Return the open connection for another reader and writer. This object cannot be used any more."""
        return self._socket, self._reader, self._authenticator

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> Record:
        while (record := self._reader.next()) is None:
            data = self._socket.recv(2**16)
            if not data:
                raise WireError("the other side closed the connection")
            self._reader.feed(data)
        return record


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def pack(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def unpack(text: Any) -> bytes:
    """Return the bytes that `pack` turned into `text`."""
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError) as error:
        raise WireError(f"a value that is not base64: {error}") from None
