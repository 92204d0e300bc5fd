"""What a rank gets from the supervisor that started it. A rank under another launcher has none of it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from trimaran.run import Heartbeat, HeartbeatBoard, Section


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorLink:
    """The supervisor's store, the heartbeat board, and the memory that outlives this process.

    `store` is `host:port` of the supervisor's store and `token` its secret; when empty, ranks use torch's own store at
    MASTER_ADDR. `term` is the term of the supervisor's lease: a rank with a lower term than the newest must not write
    checkpoints. `local_rank` is this rank's row of the board. `rank_memories` are the file descriptors of the node's
    rank memories, one per local rank, see `checkpoint/memory_copies.py`. `note` says if a warm fork server is used.
    `own_disk` is the name of this node if every node has its own run directory on its own disk. `replica_start` counts
    how often the ranks of this elastic replica were started in this attempt.
    """

    attempt: int = 0
    term: int = 0
    store: str = ""
    token: str = ""
    board: HeartbeatBoard | None = None
    local_rank: int = 0
    rank_memories: tuple[int, ...] = ()
    note: str = ""
    own_disk: str = ""
    replica_start: int = 0

    def report_section(self, section: Section, step: int = 0) -> None:
        """Report to the supervisor which section of which step this rank is in. Each call counts as progress."""
        if self.board is not None:
            self.board.enter(self.local_rank, section, step)

    @contextmanager
    def section(self, section: Section, step: int | None = None) -> Iterator[Callable[[], None]]:
        """Report `section` inside the `with` block, and the section before it again afterwards.

        Yields a function that reports one more unit of progress. `step` is that of the section before by default.
        """
        before = self.heartbeat
        if self.board is None or before is None:
            yield _no_report
            return
        report = partial(self.board.enter, self.local_rank, section, before.step if step is None else step)
        report()
        try:
            yield report
        finally:
            self.board.enter(self.local_rank, before.section, before.step)

    def report_saved(self) -> None:
        """Report that the last step is done and saved: what fails from now on neither restarts nor fails the run."""
        if self.board is not None:
            self.board.mark_saved(self.local_rank)

    @property
    def heartbeat(self) -> Heartbeat | None:
        """What the supervisor sees of this rank now; None without a supervisor."""
        return None if self.board is None else self.board.read(self.local_rank)


def _no_report() -> None:
    """Report no progress: there is no supervisor."""


NO_SUPERVISOR = SupervisorLink()


def read_supervisor_link(environment: Mapping[str, str]) -> SupervisorLink:
    """Return the link that the supervisor wrote into `environment`, see `launch/local_node.py`."""
    heartbeat, rank_memories = environment.get("TRIMARAN_PULSE"), environment.get("TRIMARAN_BERTHS", "")
    return SupervisorLink(
        attempt=int(environment.get("TRIMARAN_ATTEMPT", 0)),
        term=int(environment.get("TRIMARAN_TERM", 0)),
        store=environment.get("TRIMARAN_STORE", ""),
        token=environment.get("TRIMARAN_TOKEN", ""),
        board=HeartbeatBoard(int(heartbeat)) if heartbeat else None,
        local_rank=int(environment.get("LOCAL_RANK", 0)),
        rank_memories=tuple(int(fd) for fd in rank_memories.split(",") if fd),
        note=environment.get("TRIMARAN_FORK_SERVER", ""),
        own_disk=environment.get("TRIMARAN_OWN_DISK", ""),
        replica_start=int(environment.get("TRIMARAN_REPLICA_START", 0)),
    )
