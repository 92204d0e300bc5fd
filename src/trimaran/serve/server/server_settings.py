"""How a server behaves. Imports no torch: a command fills it in before it loads anything."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How a dead engine is started again: after a pause that doubles, and at most so many times without success."""

    first_pause: float = 0.2
    longest_pause: float = 30.0
    max_failures: int = 5
    stall_seconds: float = 600.0  # an engine with work that sends no message for this long is killed
    stop_seconds: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How a server behaves. `follow_after` is the step whose successors are loaded; None: the weights stay."""

    name: str
    token: str
    host: str = "127.0.0.1"
    max_queue: int = 1024
    max_body_bytes: int = 32 << 20
    max_client_connections: int = 1024
    drain_seconds: float = 30.0
    follow_after: int | None = None
    follow_seconds: float = 1.0
    policy: RestartPolicy = RestartPolicy()
