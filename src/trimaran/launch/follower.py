"""A node that takes its orders from another one: what its supervisor does while somebody else coordinates."""

import logging
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from trimaran.core import EXIT_AGAIN, UserError
from trimaran.launch.channel import SILENT_SECONDS
from trimaran.launch.local_node import LocalNode
from trimaran.launch.node import Orders
from trimaran.launch.remote_node import record_of_heartbeat, record_of_news
from trimaran.launch.show_ranks import show_ranks
from trimaran.launch.signals import Signals
from trimaran.run import RunDirectory
from trimaran.run.lease import Holder, LeaseWatch
from trimaran.run.wire import Line, Record

log = logging.getLogger(__name__)

EXCHANGE_SECONDS = 0.1
LOOK_SECONDS = 0.02


class CoordinatorClient:
    """Exchanges letters with the coordinator in a thread of its own, so that whatever its node does, it is heard.

    `lost` says why there will be no more letters; empty while there are. `met` is True after the first exchange.
    `taken`: another one takes part under our name.
    """

    def __init__(self, address: str, token: str, name: str) -> None:
        self.lost, self.met, self.taken = "", False, False
        self._address, self._token, self._name = address, token, name
        self._session = secrets.token_hex(8)
        self._in: deque[Record] = deque()
        self._out: deque[Record] = deque()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._exchange, name="letters", daemon=True)
        self._thread.start()

    def post(self, **letter: Any) -> None:
        self._out.append(letter)

    def received(self) -> list[Record]:
        """Return the orders that came since the last look."""
        return [self._in.popleft() for _ in range(len(self._in))]

    def close(self) -> None:
        self._over.set()
        self._thread.join(timeout=SILENT_SECONDS)

    def _exchange(self) -> None:
        try:
            with Line(self._address, self._token, seconds=SILENT_SECONDS) as line:
                while not self._over.wait(EXCHANGE_SECONDS if self.met else 0.0):
                    coordinator = [self._out.popleft() for _ in range(len(self._out))]
                    said = {"op": "exchange", "node": self._name, "session": self._session, "messages": coordinator}
                    answer = line.ask(said, seconds=SILENT_SECONDS)
                    self.taken = "error" in answer
                    if self.taken:
                        raise ConnectionRefusedError(answer["error"])
                    self._in.extend(answer["messages"])
                    self.met = True
        except TimeoutError:
            self.lost = f"no word over the connection to {self._address} for {SILENT_SECONDS:g} s"
        except OSError as error:
            self.lost = f"the connection to {self._address} broke: {error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerEnd:
    """How the time under a coordinator ended: with the run's exit `code`, or, when that is None, because of `why`.

    `met`: whether there was any contact. `under_way`: whether ranks were at work, which were killed. `taken`: another
    one takes part under our name. `refusal`: which machine the run could not work on, ours or another.
    """

    code: int | None = None
    refusal: UserError | None = None
    why: str = ""
    met: bool = False
    under_way: bool = False
    taken: bool = False


class Follower:
    """This machine's node under the orders of `holder`. Call it from the thread that made `node`.

    `unfit` is why the run could not work on this machine; the coordinator decides what that means for the others.
    """

    def __init__(
        self, run: RunDirectory, node: LocalNode, holder: Holder, token: str, *, unfit: UserError | None = None
    ) -> None:
        self.run, self.node, self.holder = run, node, holder
        self._coordinator = CoordinatorClient(holder.address, token, node.name)
        trouble = {"unfit": unfit.as_dict()} if unfit else {}
        self._coordinator.post(num_ranks=node.num_ranks, time=time.time(), **trouble)
        self._refusal: UserError | None = None
        self._under_way, self._asked = False, False
        self._heartbeats_due = 0.0
        self._end: int | None = None

    def meet(self, signals: Signals) -> bool:
        """Wait until the coordinator answers; False when it does not, or we are asked to end."""
        while not self._coordinator.met and not self._coordinator.lost and not signals.asked:
            time.sleep(LOOK_SECONDS)
        return self._coordinator.met

    def serve(self, watch: LeaseWatch, signals: Signals) -> FollowerEnd:
        """Obey until the run is over, the coordinator is lost or another one has taken over."""
        try:
            while (parting := self._look(watch, signals)) is None:
                time.sleep(LOOK_SECONDS)
            if parting.code is None:
                self.node.kill()  # at once: whoever lost the coordinator must not go on
            return parting
        finally:
            self._coordinator.close()

    def _look(self, watch: LeaseWatch, signals: Signals) -> FollowerEnd | None:
        for order in self._coordinator.received():
            self._obey(order)
        self._report()
        if self._end is not None:
            return FollowerEnd(code=self._end, refusal=self._refusal, met=True)
        if signals.urgent or (signals.asked and not self._under_way):
            self.node.kill()
            return FollowerEnd(code=signals.exit_code if self._under_way else EXIT_AGAIN, met=self._coordinator.met)
        if signals.asked and not self._asked:
            self._asked = True
            self.node.ask_to_stop()
        if signals.curious:
            signals.curious = False
            self._show()
        if self._coordinator.lost:
            return self._part(self._coordinator.lost)
        newest = watch.look()
        if newest != self.holder and (isinstance(newest, int) or newest.term > self.holder.term):
            return self._part("the coordinator's lease is over")
        return None

    def _part(self, why: str) -> FollowerEnd:
        return FollowerEnd(why=why, met=self._coordinator.met, under_way=self._under_way, taken=self._coordinator.taken)

    def _show(self) -> None:
        """Show what the ranks of this node do. Those of the others are the coordinator's to show."""
        if self._under_way:
            show_ranks(self.run, [self.node], sorted(self.node.heartbeats()), of=self.node.name)
        else:
            log.info("asked what the ranks do: none is at work here")

    def _report(self) -> None:
        """Write down what is new on this node."""
        if not self._under_way:
            return
        now = time.monotonic()
        news = [record_of_news(each, now) for each in self.node.news()]
        if news or now >= self._heartbeats_due:
            self._heartbeats_due = now + EXCHANGE_SECONDS
            heartbeats = {
                str(rank): record_of_heartbeat(heartbeat, now) for rank, heartbeat in self.node.heartbeats().items()
            }
            self._coordinator.post(news=news, heartbeats=heartbeats, clock=now)

    def _obey(self, order: Record) -> None:
        match order["do"]:
            case "start":
                self._under_way, self._heartbeats_due = True, 0.0
                self.node.start(Orders(**order["orders"]))
            case "collect_reports":
                how = {key: order[key] for key in ("seconds", "gently") if key in order}
                self.node.collect_reports(self.run.path / order["folder"], **how)
            case "stop":
                self.node.ask_to_stop()
            case "kill":
                self.node.kill()
                self._under_way = False
            case "end":
                self._end = order["code"]
                self._refusal = UserError(**order["refusal"]) if "refusal" in order else None
        self._coordinator.post(obeyed=order["number"])
