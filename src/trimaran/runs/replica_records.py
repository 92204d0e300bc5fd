"""What elastic replicas and their supervisor write to each other, in the store of the attempt. Imports no torch.

Each rank overwrites its own `Statement`. The supervisor answers with rounds: who takes part in an exchange, and then
whether all of them have its result. `start` counts how often the ranks of a replica were started in this attempt.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

STATEMENTS = "replicas/statement/"
LAST_ROUND = "replicas/last"  # the number of the last round; missing before the first: who starts later joins
FINISHED = "replicas/finished"  # set by the replica that saved the end of the run


def statement_key(rank: int) -> str:
    return f"{STATEMENTS}{rank}"


def round_key(number: int) -> str:
    return f"replicas/round/{number}"


def result_key(number: int) -> str:
    return f"replicas/result/{number}"


def lost_key(replica: int, start: int) -> str:
    """The key that is set once this replica, as it was started then, is lost."""
    return f"replicas/lost/{replica}/{start}"


def group_prefix(number: int) -> str:
    """The prefix of what the process groups of a round write."""
    return f"replicas/group/{number}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoded:
    def encode(self) -> bytes:
        """Return the value in the store."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement(_Encoded):
    """What a rank says last. `round` is the last round whose result it knows, or the one that it votes about.

    `join`: it is ready to get the state of another replica, or has restored that of `step`. `arrive`: it has trained
    until `step` and is ready to synchronise. `vote`: whether it has got all values of the exchange (`ok`).
    `stop`: the run is asked to stop; `leave`: only this rank is. `lines` are the metrics of its steps, of the first
    rank of a replica only.
    """

    kind: Literal["join", "arrive", "vote"]
    start: int
    step: int = 0
    round: int = -1
    ok: bool = False
    stop: bool = False
    leave: bool = False
    save: bool = False
    lines: list[list[float]] = field(default_factory=list)

    @classmethod
    def decode(cls, value: bytes) -> Self:
        return cls(**json.loads(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Round(_Encoded):
    """Who synchronises after `step` steps. `contributors` exchange what they trained.

    Then `source` sends its state to `joiners`. `starts` has the start of each of them. `lines` are the metrics of each
    contributor. `stop`: the run is to stop after this round. `leaving` are contributors that were asked to leave: they
    end after it. `save`: the first contributor that stays is to save a checkpoint.
    """

    number: int
    step: int
    contributors: tuple[int, ...]
    joiners: tuple[int, ...]
    source: int
    starts: dict[int, int]
    stop: bool = False
    leaving: tuple[int, ...] = ()
    save: bool = False
    lines: dict[int, list[list[float]]] = field(default_factory=dict)

    @classmethod
    def decode(cls, value: bytes) -> Self:
        tree: dict[str, Any] = json.loads(value)
        for key in ("starts", "lines"):
            tree[key] = {int(each): item for each, item in tree[key].items()}
        for key in ("contributors", "joiners", "leaving"):
            tree[key] = tuple(tree[key])
        return cls(**tree)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult(_Encoded):
    """Whether all contributors got the values, or the next round repeats it; and the `members` of the next round."""

    ok: bool
    members: tuple[int, ...]

    @classmethod
    def decode(cls, value: bytes) -> Self:
        tree = json.loads(value)
        return cls(ok=tree["ok"], members=tuple(tree["members"]))
