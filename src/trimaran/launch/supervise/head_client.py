"""What a node without a shared disk asks the head for before it follows it: recipe, plan, and what the head has of it.

The head answers from its run directory. A node creates its own run directory from that, or compares it.
"""

import logging
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimaran.core import UserError, fixed_field_changes, parse_recipe
from trimaran.core.regular_files import read_regular_text, write_atomically
from trimaran.launch.supervise.file_stream import read_received
from trimaran.launch.supervise.signals import Signals
from trimaran.runs import RunDirectory, holds_run, open_run
from trimaran.runs.create_from import create_run_from
from trimaran.runs.lease import LeaseHolder, read_holder
from trimaran.runs.wire import ChannelClient, Record, RefusedError, fingerprint

log = logging.getLogger(__name__)

OPERATION = "run_files"
ANSWER_SECONDS = 5.0
RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAnswer:
    """The head's recipe and plan as texts, the process that holds its lease, and what it has received of this node."""

    recipe: str
    plan: str
    created: float
    pid: int
    received: dict[str, int] = field(default_factory=dict)


class HeadClient:
    """Asks the head at `address`, `host:port`, as the node `name`. It also tells `Follower` who coordinates."""

    def __init__(self, address: str, token: str, name: str) -> None:
        self.holder = LeaseHolder(term=0, host=address.rpartition(":")[0], pid=0, started=0, machine="",
                                  run=fingerprint(token), address=address, created=time.time())  # fmt: skip
        self._token, self._name = token, name

    def poll(self) -> LeaseHolder:
        """Return who coordinates: always the head."""
        return self.holder

    def ask(self, signals: Signals, *, seconds: float) -> HeadAnswer | None:
        """Return the head's answer; None if it cannot be reached for `seconds`, or a stop is requested."""
        until, why = time.monotonic() + seconds, ""
        while not signals.stop_requested:
            try:
                with ChannelClient(self.holder.address, self._token, seconds=ANSWER_SECONDS) as client:
                    answer = client.request({"op": OPERATION, "node": self._name}, seconds=ANSWER_SECONDS)
                if "recipe" in answer:
                    return HeadAnswer(**answer)
                why = "it is not ready"
            except RefusedError as error:
                raise UserError("L023", f"the head runs another run, {error.run}, or has another token",
                                where=self.holder.address, fix="start all nodes with the same TRIMARAN_RUN_TOKEN or "
                                "--token-file, and each run with its own --head HOST:PORT") from None  # fmt: skip
            except OSError as error:
                why = str(error)
            if time.monotonic() >= until:
                log.error("the head at %s cannot be reached for %g s: %s", self.holder.address, seconds, why)
                return None
            time.sleep(RETRY_SECONDS)
        return None


def answer_not_ready(request: Record) -> Record:
    """Return the answer to `HeadClient.ask` of a head that does not hold the lease yet."""
    return {"error": "not ready"}


def answer_nodes(run: RunDirectory, holder: LeaseHolder, request: Record) -> Record:
    """Return the answer to `HeadClient.ask` of the head, which holds the lease."""
    texts = {"recipe": read_regular_text(run.recipe), "plan": read_regular_text(run.plan)}
    known = {"created": holder.created, "pid": holder.pid, "received": read_received(run, str(request.get("node")))}
    return texts | known


def create_as_head_has_it(path: Path, answer: HeadAnswer) -> RunDirectory:
    """Return the run at `path`, created from the head's recipe and plan if there is none.

    Raises if it is another run, or if it is the head's own directory: the disk is shared.
    """
    if holds_run(path):
        run = open_run(path)
        holder = read_holder(run)
        if holder is not None and (holder.created, holder.pid) == (answer.created, answer.pid):
            raise UserError("L022", "this node and the head have the same run directory: the disk is shared",
                            where=str(path), fix="leave out --own-disk on all nodes")  # fmt: skip
        if changed := fixed_field_changes(run.read_recipe(), parse_recipe(answer.recipe, name="the head's recipe")):
            raise UserError("L024", f"the head runs another run: {', '.join(changed)} differ", where=str(path),
                            fix="name a new run directory on this node, or the head of this run")  # fmt: skip
        return run
    source = RunDirectory(path.absolute().with_name(f".{path.name}-{secrets.token_hex(4)}"))
    source.path.mkdir(mode=0o700, parents=True)
    try:
        write_run_files(source, {"recipe": answer.recipe, "plan": answer.plan})
        return create_run_from(source.path, path)
    finally:
        for file in (source.recipe, source.plan):
            file.unlink(missing_ok=True)
        source.path.rmdir()


def write_run_files(run: RunDirectory, files: dict[str, Any]) -> None:
    """Write the head's recipe and plan, where they differ: ranks read them."""
    for path, text in ((run.recipe, files["recipe"]), (run.plan, files["plan"])):
        if not path.exists() or read_regular_text(path) != text:
            write_atomically(path, text)
