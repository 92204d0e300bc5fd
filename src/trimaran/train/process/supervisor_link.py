"""What ties a rank to the supervisor that started it; a rank under somebody else's launcher has none of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from trimaran.run import Heartbeat, HeartbeatBoard, Section


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorLink:
    """Where to meet the other ranks, where to show that this one lives, and the memory that outlives it.

    `store` is `host:port` of the supervisor's store and `token` opens it; empty: torch's own, at MASTER_ADDR.
    `term` is of the supervisor's lease: whoever has a lower one than the newest must not write checkpoints.
    `rank memories` are the file descriptors of the node's memory, one for each of its ranks, see `checkpoint/memory_copies.py`.
    """

    attempt: int = 0
    term: int = 0
    store: str = ""
    token: str = ""
    board: HeartbeatBoard | None = None
    place: int = 0
    rank_memories: tuple[int, ...] = ()

    def enter(self, section: Section, step: int = 0) -> None:
        """Show the supervisor how far the loop has come."""
        if self.board is not None:
            self.board.enter(self.place, section, step)

    @property
    def heartbeat(self) -> Heartbeat | None:
        """What the supervisor sees of this rank now; None where there is none."""
        return None if self.board is None else self.board.read(self.place)


NO_SUPERVISOR = SupervisorLink()


def supervisor_link_of(environment: Mapping[str, str]) -> SupervisorLink:
    """Return the ties that a supervisor wrote into `environment`, see `launch/node.py`."""
    heartbeat, rank_memories = environment.get("TRIMARAN_PULSE"), environment.get("TRIMARAN_BERTHS", "")
    return SupervisorLink(
        attempt=int(environment.get("TRIMARAN_ATTEMPT", 0)),
        term=int(environment.get("TRIMARAN_TERM", 0)),
        store=environment.get("TRIMARAN_STORE", ""),
        token=environment.get("TRIMARAN_TOKEN", ""),
        board=HeartbeatBoard(int(heartbeat)) if heartbeat else None,
        place=int(environment.get("LOCAL_RANK", 0)),
        rank_memories=tuple(int(fd) for fd in rank_memories.split(",") if fd),
    )
