"""Sends the store requests of a node's ranks to the coordinator, and its answers back, many in one message.

The ranks of a node ask the node's own channel, which has one connection to the coordinator for all of them. While a
message is on its way, the requests that arrive are collected for the next one: the busier the coordinator, the fewer
and longer the messages that it gets.

Keys that are written once, by the rank that they name, are answered here: a `set` before the coordinator has it, and a
`get` of what a rank of this node has set. If the connection breaks, none of these ranks gets any further answer, so
that no value can be missing without notice.
"""

from collections.abc import Callable, Hashable
from functools import partial
from itertools import count

from trimaran.launch.supervise.key_store import AttemptStores, Reply
from trimaran.runs.wire import WRITTEN_ONCE, Record, WireError, unpack

OPERATION = "relay"
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
        if are_written_once(request):
            keys = request["keys"]
            match request.get("op"):
                case "set" if is_short(request):
                    self._set(keys, request["values"])
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

    def _set(self, keys: list[str], values: list[str]) -> None:
        self._values |= zip(keys, values, strict=True)
        last = self._unsent[-1] if self._unsent else None
        if last is None or last[0] is not None or len(last[1]["keys"]) >= MAX_KEYS:
            self._unsent.append((None, {"op": "set", "keys": [*keys], "values": [*values]}))
        else:
            last[1]["keys"] += keys
            last[1]["values"] += values

    def _send_all(self, requests: list[RelayedRequest]) -> None:
        """Send `requests` in one message, or in several if they are too long for one."""
        try:
            self._send({"op": OPERATION, "attempt": self.attempt, "requests": requests})
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

    def answer(self, message: Record, stores: AttemptStores, *, client: Hashable, now: float) -> None:
        """Answer the requests of the ranks of another node. A malformed one is answered with an error."""
        requests = message.get("requests")
        if not isinstance(requests, list) or not all(map(is_relayed, requests)):
            raise WireError("a message of a relay without requests")
        keys = stores.store_of(message)
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


def are_written_once(request: Record) -> bool:
    """Return whether all keys of `request` are written once."""
    keys = request.get("keys")
    if not isinstance(keys, list) or not keys:
        return False
    return all(isinstance(key, str) and WRITTEN_ONCE in key for key in keys)


def is_short(request: Record) -> bool:
    """Return whether a `set` may be sent together with others. Raises `WireError` if one of its values is malformed."""
    keys, values = request["keys"], request.get("values")
    if not isinstance(values, list) or len(values) != len(keys):
        raise WireError("the numbers of keys and values differ")
    return sum(map(len, keys)) + sum(len(unpack(value)) for value in values) <= MAX_SET_BYTES


def is_relayed(item: object) -> bool:
    """Return whether `item` is a request or an answer with its number."""
    return isinstance(item, list) and len(item) == 2 and isinstance(item[0], int | None) and isinstance(item[1], dict)
