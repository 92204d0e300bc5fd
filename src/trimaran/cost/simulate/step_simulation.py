"""One optimizer step as a discrete-event simulation: passes, messages and collectives that share a network."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Literal, NamedTuple

from trimaran.cost.simulate.pipeline_order import Pass
from trimaran.cost.simulate.step_costs import StepCosts, fair_share


class EventQueue:
    """Actions at future times. Of actions at the same time, the one that was added first runs first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(time, self.now), next(self._numbers), action))

    def run(self) -> None:
        """Run all actions in the order of their times; they may add others."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()


Track = Literal["compute", "send", "gather", "reduce", "update"]
Message = tuple[str, int, int]  # forward or backward, the stage that waits for it, and the micro-batch


class SimulatedSpan(NamedTuple):
    """Something that a pipeline rank did: what, for which stage and micro-batch, from when to when."""

    rank: int
    track: Track
    name: str
    stage: int
    micro_batch: int
    start: float
    end: float


class SimulatedStep(NamedTuple):
    """A step of one pipeline: its length, and what its ranks did."""

    seconds: float
    spans: tuple[SimulatedSpan, ...]
    ranks: int

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time until the last backward in which they do not compute."""
        computing = [each for each in self.spans if each.track == "compute"]
        return 1 - sum(each.end - each.start for each in computing) / (self.ranks * max(each.end for each in computing))

    def mean_seconds(self, track: Track, stage: int, name: str) -> float:
        """Return the mean length of a stage's messages or collectives; 0 if it has none."""
        lengths = [each.end - each.start for each in self.spans if each[1:4] == (track, name, stage)]
        return sum(lengths) / len(lengths) if lengths else 0.0


def simulate_step(costs: StepCosts) -> SimulatedStep:
    """Return a step in which every node is equally fast, of one pipeline among many equal ones."""
    return _StepSimulation(costs).run()


def message_of(done: Pass, num_stages: int) -> Message | None:
    """Return what a pass sends: activations to the next stage, gradients to the one before; None at the ends."""
    if done.kind == "forward":
        return ("forward", done.stage + 1, done.micro_batch) if done.stage + 1 < num_stages else None
    return ("backward", done.stage - 1, done.micro_batch) if done.kind != "weight_grad" and done.stage else None


def input_of(next_pass: Pass, num_stages: int) -> Message | None:
    """Return what a pass waits for. The first stage's forward and the last one's backward wait for nothing else."""
    if next_pass.kind == "forward":
        return ("forward", next_pass.stage, next_pass.micro_batch) if next_pass.stage else None
    is_waiting = next_pass.kind != "weight_grad" and next_pass.stage + 1 < num_stages
    return ("backward", next_pass.stage, next_pass.micro_batch) if is_waiting else None


class _Flow:
    """A transfer that is under way: seconds left at full speed, its demands, and what happens at its end."""

    def __init__(self, seconds: float, demands: dict[str, float], at_end: Callable[[], None]) -> None:
        self.left, self.demands, self.at_end, self.speed = seconds, demands, at_end, 1.0


class _SharedNetwork:
    """Transfers that share cards and uplinks. Whenever one starts or ends, the speeds of all change."""

    def __init__(self, queue: EventQueue) -> None:
        self._queue, self._flows, self._updated, self._version = queue, [], 0.0, 0

    def start(self, seconds: float, demands: dict[str, float], at_end: Callable[[], None]) -> None:
        if not seconds:
            self._queue.at(self._queue.now, at_end)
            return
        self._progress()
        self._flows.append(_Flow(seconds, demands, at_end))
        self._share()

    def _progress(self) -> None:
        for flow in self._flows:
            flow.left -= flow.speed * (self._queue.now - self._updated)
        self._updated = self._queue.now

    def _share(self) -> None:
        self._version += 1
        if not self._flows:
            return
        for flow, speed in zip(self._flows, fair_share([each.demands for each in self._flows]), strict=True):
            flow.speed = speed
        version = self._version
        first = min(each.left / each.speed for each in self._flows)
        self._queue.at(self._queue.now + max(0.0, first), lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version != self._version:  # another transfer started or ended meanwhile
            return
        self._progress()
        ended = [flow for flow in self._flows if flow.left <= 1e-12]
        self._flows = [flow for flow in self._flows if flow.left > 1e-12]
        self._share()
        for flow in ended:
            flow.at_end()


class _Rank:
    """A pipeline rank: its remaining passes, what it waits for, and the stages that are complete."""

    def __init__(self, passes: tuple[Pass, ...]) -> None:
        self.passes, self.position, self.is_busy = passes, 0, False
        self.held: Message | None = None  # sent, but not yet received; the rank waits for it

    @property
    def next(self) -> Pass | None:
        return self.passes[self.position] if self.position < len(self.passes) else None


class _StepSimulation:
    def __init__(self, costs: StepCosts) -> None:
        self._costs, self._order, self._queue = costs, costs.order, EventQueue()
        self._network = _SharedNetwork(self._queue)
        self._ranks = [_Rank(passes) for passes in costs.order.passes]
        self._sent: set[Message] = set()  # computed, and not under way yet
        self._posted: set[Message] = set()
        self._received: set[Message] = set()
        self._has_first = [cost.gather == 0.0 for cost in costs.stages]  # the first block's weights, or all of them
        self._has_weights = list(self._has_first)
        self._late: dict[int, tuple[int, Pass, float]] = {}  # forwards that computed faster than weights arrived
        self._left = [sum(each.stage == stage and each.kind != "forward" for passes in costs.order.passes
                          for each in passes) for stage in range(costs.order.num_stages)]  # fmt: skip
        self._spans: list[SimulatedSpan] = []
        self._end = 0.0

    def run(self) -> SimulatedStep:
        for rank in range(len(self._ranks)):
            owners, stages = self._order.rank_of_stage, enumerate(self._costs.stages)
            self._gather(rank, [stage for stage, cost in stages if owners[stage] == rank and cost.gather])
            self._go_on(rank)
        self._queue.run()
        assert all(rank.next is None for rank in self._ranks), "a rank waits for a message that nobody sends"
        end = self._end + self._costs.update
        for rank in range(len(self._ranks)):
            self._spans.append(SimulatedSpan(rank, "update", "optimizer", -1, -1, self._end, end))
        return SimulatedStep(end, tuple(sorted(self._spans, key=lambda each: each.start)), len(self._ranks))

    def _gather(self, rank: int, stages: list[int]) -> None:
        """Gather the weights of a rank's stages, one after another. The first block's weights are enough to start."""
        if not stages:
            return
        stage, start = stages[0], self._queue.now
        cost = self._costs.stages[stage]

        def has_first() -> None:
            self._has_first[stage] = True
            self._go_on(rank)
            self._network.start(cost.gather - cost.first_gather, self._ring_demands(rank), has_all)

        def has_all() -> None:
            self._span(rank, "gather", "weights", stage, -1, start)
            self._has_weights[stage] = True
            if stage in self._late:
                self._finish(*self._late.pop(stage))
            self._gather(rank, stages[1:])

        self._network.start(cost.first_gather, self._ring_demands(rank), has_first)

    def _go_on(self, rank: int) -> None:
        """Start the rank's next pass if all it waits for is there; else post its receive."""
        state = self._ranks[rank]
        if state.is_busy or (work := state.next) is None:
            return
        needed = input_of(work, self._order.num_stages)
        if needed and needed not in self._posted:
            self._posted.add(needed)
            self._send_if_ready(needed)
        if (needed and needed not in self._received) or state.held or not self._has_first[work.stage]:
            return
        state.is_busy, start = True, self._queue.now
        cost = self._costs.stages[work.stage]
        seconds = cost.seconds(work.kind)
        self._left[work.stage] -= work.kind != "forward"
        if cost.reduce and not self._left[work.stage]:
            self._queue.at(start + (1 - self._costs.overlap) * seconds, lambda: self._reduce(rank, work.stage))
        self._queue.at(start + seconds, lambda: self._finish(rank, work, start))

    def _finish(self, rank: int, work: Pass, start: float) -> None:
        state, now = self._ranks[rank], self._queue.now
        if not self._has_weights[work.stage]:
            self._late[work.stage] = rank, work, start
            return
        self._span(rank, "compute", work.kind, work.stage, work.micro_batch, start)
        state.is_busy, state.position = False, state.position + 1
        self._end = max(self._end, now)
        if not self._left[work.stage] and work.kind != "forward":
            self._end = max(self._end, now + self._costs.stages[work.stage].last_reduce)
        if message := message_of(work, self._order.num_stages):
            self._sent.add(message)
            if work.holds:
                state.held = message
            self._send_if_ready(message)
        self._go_on(rank)

    def _send_if_ready(self, message: Message) -> None:
        """Start a message once it is computed and, unless receives are posted early, the receiver waits for it."""
        if message not in self._sent or not (self._order.posts_early or message in self._posted):
            return
        self._sent.remove(message)
        kind, stage, number = message
        source = stage - 1 if kind == "forward" else stage + 1
        sender, receiver, start = self._order.rank_of_stage[source], self._order.rank_of_stage[stage], self._queue.now

        def done() -> None:
            if sender != receiver:
                self._span(sender, "send", kind, source, number, start)
            self._received.add(message)
            if self._ranks[sender].held == message:
                self._ranks[sender].held = None
                self._go_on(sender)
            self._go_on(receiver)

        seconds = self._costs.send[min(source, stage)]
        needed = self._costs.demands
        demands = {f"out {sender}": needed.send_card, f"in {receiver}": needed.send_card}
        if needed.pod_of(sender) != needed.pod_of(receiver):
            demands[f"uplink {needed.pod_of(sender)}"] = min(1.0, needed.send_uplink)
        self._network.start(seconds, demands, done)

    def _reduce(self, rank: int, stage: int) -> None:
        start, cost = self._queue.now, self._costs.stages[stage]

        def done() -> None:
            self._span(rank, "reduce", "gradients", stage, -1, start)
            self._end = max(self._end, self._queue.now)

        self._network.start(cost.reduce, self._ring_demands(rank), done)

    def _ring_demands(self, rank: int) -> dict[str, float]:
        needed = self._costs.demands
        cards = {f"out {rank}": needed.ring_card, f"in {rank}": needed.ring_card}
        return cards | {f"uplink {needed.pod_of(rank)}": min(1.0, needed.ring_uplink)}

    def _span(self, rank: int, track: Track, name: str, stage: int, micro_batch: int, start: float) -> None:
        self._spans.append(SimulatedSpan(rank, track, name, stage, micro_batch, start, self._queue.now))
