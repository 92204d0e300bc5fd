"""The key-value stores of a run's attempts, the requests that wait for keys in them, and the relay of a node.

The ranks of a node ask the node's own channel, which has one connection to the coordinator for all of them. While a
message is on its way, the requests that arrive are collected for the next one: the busier the coordinator, the fewer
and longer the messages that it gets.

Keys that are written once, by the rank that they name, are answered by the relay: a `set` before the coordinator has
it, and a `get` of what a rank of this node has set. If the connection breaks, none of these ranks gets any further
answer, so that no value can be missing without notice.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from trimaran.runs import WRITTEN_ONCE, Record, WireError, pack, unpack

Reply = Callable[[Record], None]
MAX_TIMEOUTS_LEFT = 1024  # of requests that are over: a timeout may be hours away


@dataclass(eq=False, slots=True)
class PendingWait:
    """A request that is answered when none of its keys is `missing` any more, or when it times out."""

    keys: list[str]
    missing: set[str]
    until: float
    reply: Reply
    client: Hashable
    with_values: bool
    is_over: bool = False  # it is answered, or its client is gone


class KeyStore:
    """The values of one attempt by key, as bytes. The operations behave like those of `torch.distributed.Store`."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._waiting: dict[str, set[PendingWait]] = {}
        self._of_client: dict[Hashable, set[PendingWait]] = defaultdict(set)
        self._timeouts: list[tuple[float, int, PendingWait]] = []  # a heap; requests that are over leave it later
        self._numbers, self._num_waiting = count(), 0

    @property
    def is_idle(self) -> bool:
        """Whether no request waits, and nothing is kept for one that did."""
        return not (self._num_waiting or self._waiting or self._of_client)

    def answer(self, request: Record, reply: Reply, *, client: Hashable, now: float) -> None:
        """Execute `request` of `client` and reply, now or when its keys are set. Raises `WireError` if malformed."""
        name = str(request.get("op"))
        if name in ("get", "wait"):
            self._wait(request, reply, client=client, now=now)
        else:
            reply(self._execute(name, request))

    def expire(self, now: float) -> None:
        """Reply with a timeout to the requests whose time is up."""
        while self._timeouts and (self._timeouts[0][2].is_over or self._timeouts[0][0] <= now):
            each = heapq.heappop(self._timeouts)[2]
            if not each.is_over:
                self._drop(each)
                each.reply({"error": "timeout", "missing": sorted(each.missing)[:8]})

    def next_timeout(self) -> float | None:
        """Return when the next request times out, or earlier; None if none waits."""
        return self._timeouts[0][0] if self._timeouts else None

    def close(self) -> None:
        """Reply to all requests that wait: the attempt is over."""
        for each in [each for of_client in self._of_client.values() for each in of_client]:
            self._drop(each)
            each.reply({"error": "over"})

    def drop_client(self, client: Hashable) -> None:
        """Forget the requests of a client that has disconnected."""
        for each in list(self._of_client.get(client, ())):
            self._drop(each)

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value
        for each in self._waiting.pop(key, ()):
            each.missing.discard(key)
            if not each.missing:
                self._drop(each)
                each.reply(self._answer(each))

    def _execute(self, name: str, request: Record) -> Record:
        """Return the answer to an operation that never waits."""
        match name:
            case "set":
                values, names = _list(request, "values"), _names(request)
                if len(names) != len(values):
                    raise WireError("the numbers of keys and values differ")
                for key, value in zip(names, [unpack(value) for value in values], strict=True):
                    self.put(key, value)
                return {}
            case "add":
                key, amount = _name(request), request.get("amount")
                before = self.values.get(key, b"0")
                if not isinstance(amount, int) or not before.removeprefix(b"-").isdigit():
                    raise WireError("add needs integers")
                self.put(key, str(int(before) + amount).encode())
                return {"amount": int(self.values[key])}
            case "append":
                key = _name(request)
                self.put(key, self.values.get(key, b"") + unpack(request.get("value")))
                return {}
            case "compare_set":
                key, expected = _name(request), unpack(request.get("expected"))
                desired, current = unpack(request.get("value")), self.values.get(key)
                if current == expected or (current is None and not expected):
                    self.put(key, desired)
                    return {"value": pack(desired)}
                return {"value": pack(expected if current is None else current)}
            case "check":
                return {"all": all(key in self.values for key in _names(request))}
            case "delete":
                return {"deleted": self.values.pop(_name(request), None) is not None}
            case "list":
                return {"keys": list(self.values)}
        raise WireError(f"unknown operation: {name[:40]}")

    def _wait(self, request: Record, reply: Reply, *, client: Hashable, now: float) -> None:
        """Reply, now or when no key of `request` is missing any more."""
        keys, seconds = _names(request), request.get("seconds")
        if not isinstance(seconds, int | float) or not 0 <= seconds < 1e9:
            raise WireError("seconds is not a number of seconds")
        until = now + seconds
        missing = {key for key in keys if key not in self.values}
        waiting = PendingWait(keys, missing, until, reply, client, with_values=request["op"] == "get")
        if not missing:
            reply(self._answer(waiting))
            return
        self._num_waiting += 1
        self._of_client[client].add(waiting)
        heapq.heappush(self._timeouts, (until, next(self._numbers), waiting))
        for key in missing:
            self._waiting.setdefault(key, set()).add(waiting)

    def _answer(self, waiting: PendingWait) -> Record:
        return {"values": [pack(self.values[key]) for key in waiting.keys]} if waiting.with_values else {}

    def _drop(self, waiting: PendingWait) -> None:
        waiting.is_over = True
        of_client = self._of_client[waiting.client]
        of_client.discard(waiting)
        if not of_client:
            del self._of_client[waiting.client]
        for key in waiting.missing:
            others = self._waiting.get(key, set())
            others.discard(waiting)
            if not others:
                self._waiting.pop(key, None)
        self._num_waiting -= 1
        if len(self._timeouts) > 2 * self._num_waiting + MAX_TIMEOUTS_LEFT:
            self._timeouts = [each for each in self._timeouts if not each[2].is_over]
            heapq.heapify(self._timeouts)


def _list(request: Record, field: str) -> list[Any]:
    value = request.get(field)
    if not isinstance(value, list):
        raise WireError(f"{field} is not a list")
    return value


def _names(request: Record) -> list[str]:
    names = _list(request, "keys")
    if not all(isinstance(name, str) for name in names):
        raise WireError("a key is not a string")
    return list(names)


def _name(request: Record) -> str:
    names = _names(request)
    if len(names) != 1:
        raise WireError("the operation needs exactly one key")
    return names[0]


RELAY = "relay"  # the operation of a message of a relay
MAX_KEYS, MAX_SET_BYTES = 256, 2**14  # of sets in one, and of one set: all together are shorter than a frame may be
RelayedRequest = tuple[int | None, Record]  # with the number that its answer gets; None: no answer is wanted


class StoreRelay:
    """The requests of one attempt that wait to be sent, or to be answered. `send` sends a message to the coordinator.

    It does no I/O of its own: `answer` takes requests of ranks, `receive` the coordinator's messages, and `flush` is to
    be called after either.
    """

    def __init__(self, attempt: int, send: Callable[[Record], None]) -> None:
        self.attempt, self._send = attempt, send
        self._values: dict[str, str] = {}  # of keys that are written once, and that ranks of this node have set
        self._unsent: list[RelayedRequest] = []
        self._unsent_waits: dict[str, int] = {}  # by operation, keys and timeout
        self._replies: dict[int, list[Reply]] = {}
        self._numbers = count()
        self._num_untaken = 0  # messages that the coordinator has not taken yet

    def answer(self, request: Record, reply: Reply) -> None:
        """Reply now, or when the coordinator has answered. Raises `WireError` for a malformed request."""
        if request.get("attempt") != self.attempt:
            reply({"error": "over"})
            return
        keys = request.get("keys")
        if isinstance(keys, list) and keys and all(isinstance(key, str) and WRITTEN_ONCE in key for key in keys):
            match request.get("op"):
                case "set" if is_short(request):
                    values = request["values"]
                    self._values |= zip(keys, values, strict=True)
                    last = self._unsent[-1] if self._unsent else None
                    if last is None or last[0] is not None or len(last[1]["keys"]) >= MAX_KEYS:
                        self._unsent.append((None, {"op": "set", "keys": [*keys], "values": [*values]}))
                    else:
                        last[1]["keys"] += keys
                        last[1]["values"] += values
                    reply({})
                    return
                case "get" | "wait" as operation if all(key in self._values for key in keys):
                    reply({"values": [self._values[key] for key in keys]} if operation == "get" else {})
                    return
                case "set" | "append" | "add" | "compare_set" | "delete":
                    for key in keys:
                        self._values.pop(key, None)
        number = next(self._numbers)
        if request.get("op") in ("get", "wait"):
            alike = f"{request['op']} {request.get('keys')} {request.get('seconds')}"
            number = self._unsent_waits.setdefault(alike, number)
        if number in self._replies:  # another rank asks the same in the same message
            self._replies[number].append(reply)
            return
        self._replies[number] = [reply]
        self._unsent.append((number, {name: each for name, each in request.items() if name != "attempt"}))

    def receive(self, message: Record) -> None:
        """Take a message of the coordinator: how many of ours it has `taken`, and answers by number."""
        taken, answers = message.get("taken"), message.get("answers")
        if not isinstance(taken, int) or not isinstance(answers, list) or not all(map(is_relayed, answers)):
            raise WireError("a message to a relay without answers")
        self._num_untaken -= taken
        for number, answer in answers:
            for reply in self._replies.pop(number, ()):
                reply(answer)

    def flush(self) -> None:
        """Send what is unsent, unless an earlier message is still on its way."""
        if self._unsent and not self._num_untaken:
            requests, self._unsent, self._unsent_waits = self._unsent, [], {}
            self._send_all(requests)

    def _send_all(self, requests: list[RelayedRequest]) -> None:
        """Send `requests` in one message, or in several if they are too long for one."""
        try:
            self._send({"op": RELAY, "attempt": self.attempt, "requests": requests})
            self._num_untaken += 1
        except WireError as error:
            middle = len(requests) // 2
            if middle:
                self._send_all(requests[:middle])
                self._send_all(requests[middle:])
                return
            number = requests[0][0]
            assert number is not None, "a set that was answered is short"
            for reply in self._replies.pop(number):
                reply({"error": str(error)})


class RelayAnswers:
    """The coordinator's side of a relay: the answers that wait to be sent. `send` sends a message to the relay.

    It does no I/O of its own: with something to send, it is in the set `unsent`, and `flush` is to be called.
    """

    def __init__(self, send: Callable[[Record], None], unsent: "set[RelayAnswers]") -> None:
        self._send, self._unsent = send, unsent
        self._num_taken = 0  # messages of the relay that arrived
        self._answers: list[tuple[int, Record]] = []

    def answer(self, requests: list[RelayedRequest], keys: KeyStore | None, *, client: Hashable, now: float) -> None:
        """Answer another node's ranks, malformed requests with an error. `keys` is their store; None if it is over."""
        self._num_taken += 1
        self._unsent.add(self)
        for number, request in requests:
            reply = partial(self.reply, number)
            if keys is None:
                reply({"error": "over"})
                continue
            try:
                keys.answer(request, reply, client=client, now=now)
            except WireError as error:
                reply({"error": str(error)})

    def reply(self, number: int | None, answer: Record) -> None:
        """Answer one request, together with others. It wants no answer if `number` is None."""
        if number is not None:
            self._answers.append((number, answer))
            self._unsent.add(self)

    def flush(self) -> None:
        """Send one message, or several if the answers are too long for one."""
        answers, self._answers = self._answers, []
        self._send_all(answers)

    def _send_all(self, answers: list[tuple[int, Record]]) -> None:
        try:
            self._send({"taken": self._num_taken, "answers": answers})
            self._num_taken = 0
        except WireError as error:
            middle = len(answers) // 2
            parts = (answers[:middle], answers[middle:]) if middle else ([(answers[0][0], {"error": str(error)})],)
            for part in parts:
                self._send_all(part)


def is_short(request: Record) -> bool:
    """Return whether a `set` may be sent together with others. Raises `WireError` if one of its values is malformed."""
    keys, values = request["keys"], request.get("values")
    if not isinstance(values, list) or len(values) != len(keys):
        raise WireError("the numbers of keys and values differ")
    return sum(map(len, keys)) + sum(len(unpack(value)) for value in values) <= MAX_SET_BYTES


def is_relayed(item: object) -> bool:
    """Return whether `item` is a request or an answer with its number."""
    return isinstance(item, list) and len(item) == 2 and isinstance(item[0], int | None) and isinstance(item[1], dict)
