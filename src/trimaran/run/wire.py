"""Frames between the processes of a run: JSON behind a length and a seal, opened by a token that is never sent.

Both sides prove that they know the token by answering the other's nonce. The frames after that carry a seal, made with
a key of this one conversation, and are counted: nobody on the way can put in, leave out or repeat one. What they say
can be read on the way; no secret is in it.
"""

import base64
import hashlib
import hmac
import json
import secrets
import socket
import struct
from types import TracebackType
from typing import Any, Literal, Self

Record = dict[str, Any]
Side = Literal["server", "client"]
STRANGER_BYTES = 4 * 2**10  # of one frame, before the token was proved
FRIEND_BYTES = 16 * 2**20
LENGTH = struct.Struct("!I")
SEAL_BYTES = 16
NONCE_BYTES = 32


class WireError(ConnectionError):
    """What came is not what the other side of a conversation would say; it has to be closed."""


class RefusedError(WireError):
    """The other side does not know the token. `run` is the name it gave to its run."""

    def __init__(self, run: str) -> None:
        super().__init__(f"run {run} does not know this token")
        self.run = run


def fingerprint(token: str) -> str:
    """Return the name of a run for people and other runs; nothing of the token can be learnt from it."""
    return hashlib.sha256(f"trimaran run {token}".encode()).hexdigest()[:12]


def new_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def proof(token: str, side: Side, server_nonce: str, client_nonce: str) -> str:
    """Return what `side` has to say to be believed."""
    return _mac(token.encode(), f"{side} {server_nonce} {client_nonce}".encode()).hex()


def matches(said: Any, expected: str) -> bool:
    return isinstance(said, str) and hmac.compare_digest(said.encode(), expected.encode())


class Seal:
    """Marks the frames of one side of a conversation, in their order."""

    def __init__(self, token: str, side: Side, server_nonce: str, client_nonce: str) -> None:
        self._key = _mac(token.encode(), f"seal {side} {server_nonce} {client_nonce}".encode())
        self._count = 0

    def next(self, payload: bytes) -> bytes:
        """Return the seal of the next frame."""
        self._count += 1
        return _mac(self._key, self._count.to_bytes(8, "big") + payload)[:SEAL_BYTES]


def frame(record: Record, seal: Seal | None = None) -> bytes:
    """Return `record` as bytes to send. Raises when it is longer than any reader accepts."""
    payload = json.dumps(record, separators=(",", ":")).encode()
    if len(payload) > FRIEND_BYTES:
        raise WireError(f"a message of {len(payload)} bytes is too long")
    return LENGTH.pack(len(payload)) + (seal.next(payload) if seal else b"") + payload


class Reader:
    """Turns what arrives, in pieces of any size, into records: small ones, and after `trust` long and sealed ones."""

    def __init__(self) -> None:
        self._seal: Seal | None = None
        self._limit = STRANGER_BYTES
        self._buffer = bytearray()

    def trust(self, seal: Seal) -> None:
        self._seal, self._limit = seal, FRIEND_BYTES

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> Record | None:
        """Return the next whole record, or None until more has arrived."""
        if len(self._buffer) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._buffer)
        if length > self._limit:
            raise WireError(f"a frame of {length} bytes, at most {self._limit} are allowed")
        begin = LENGTH.size + (SEAL_BYTES if self._seal else 0)
        if len(self._buffer) < begin + length:
            return None
        payload = bytes(self._buffer[begin : begin + length])
        seal = bytes(self._buffer[LENGTH.size : begin])
        del self._buffer[: begin + length]
        if self._seal and not hmac.compare_digest(seal, self._seal.next(payload)):
            raise WireError("a frame whose seal is wrong")
        return _record(payload)


class Line:
    """A conversation with a `launch.channel.Channel`, in questions and answers. For one thread at a time."""

    def __init__(self, address: str, token: str, *, seconds: float) -> None:
        """Connect to `address`, `host:port`, and prove the token within `seconds`."""
        host, port = split_address(address)
        self._socket = socket.create_connection((host, port), timeout=seconds)
        self._reader = Reader()
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._seal = self._introduce(token)
        except BaseException:
            self.close()
            raise

    def ask(self, record: Record, *, seconds: float) -> Record:
        """Return the answer to `record`. After an error, a timeout among them, the line is of no more use."""
        self._socket.settimeout(seconds)
        self._socket.sendall(frame(record, self._seal))
        return self._read()

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _introduce(self, token: str) -> Seal:
        hello = self._read()
        run, theirs, ours = str(hello.get("run", "?")), str(hello.get("nonce", "")), new_nonce()
        if run != fingerprint(token):
            raise RefusedError(run)
        self._socket.sendall(frame({"nonce": ours, "proof": proof(token, "client", theirs, ours)}))
        if not matches(self._read().get("proof"), proof(token, "server", theirs, ours)):
            raise RefusedError(run)
        self._reader.trust(Seal(token, "server", theirs, ours))
        return Seal(token, "client", theirs, ours)

    def _read(self) -> Record:
        while (record := self._reader.next()) is None:
            data = self._socket.recv(2**16)
            if not data:
                raise WireError("the other side hung up")
            self._reader.feed(data)
        return record


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def pack(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def unpack(text: Any) -> bytes:
    """Return the bytes that `pack` made `text` of."""
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError) as error:
        raise WireError(f"a value that is not base64: {error}") from None


def _record(payload: bytes) -> Record:
    try:
        record = json.loads(payload)
    except (ValueError, RecursionError):
        raise WireError("a frame that is not JSON") from None
    if not isinstance(record, dict):
        raise WireError("a frame that is not a JSON object")
    return record


def _mac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")
