"""The parameter server of asynchronous SGD, sharded over the ranks, and how workers reach it."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimaran.core import PHASES, Mesh, TrainSection
from trimaran.parallel import learning_rate
from trimaran.runs import closed_listeners
from trimaran.train.health.guard import RefusedStep, StepNumbers
from trimaran.train.steppers.update import Updater

POLL_SECONDS = 1.0  # between two checks whether another thread has failed


@dataclass(frozen=True, slots=True)
class Batch:
    """The number of a batch, and the version of the weights that its gradient needs at least."""

    number: int
    version: int


@dataclass(frozen=True, slots=True)
class Pause:
    """All workers wait for each other once `step` updates are applied."""

    step: int


class BatchCounter:
    """The shared counter of batches. Its methods may be called by any thread.

    A worker that begins batch b of n workers promises an update of number b // n at the latest. Let v be the oldest
    version of the weights that any worker computes on. Then b may begin once b // n is at most v + staleness: the
    gradients of all batches in progress are applied before update v + staleness + 1. With staleness 0, all batches of a
    step are computed on the same weights, and no batch of the next step begins before they are updated.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        staleness: int,
        check: Callable[[], None] = lambda: None,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """`check` raises if another thread of this rank has failed, so that nobody waits forever."""
        self._poll_seconds = poll_seconds
        self._num_workers, self._staleness, self._check = num_workers, staleness, check
        self._changed = threading.Condition()
        self._segment = 0  # segments end with a pause
        self._begun = self._finished = self._end = 0  # batches
        self._version = 0
        self._in_progress: dict[int, int] = {}  # by worker: the version at which its batch began

    def open(self, *, start: int, end: int) -> None:
        """Begin a segment, the steps from `start` to `end`. All batches before it are applied."""
        with self._changed:
            assert not self._in_progress, "a segment begins after a pause"
            self._segment += 1
            self._begun = self._finished = start * self._num_workers
            self._end, self._version = end * self._num_workers, start
            self._changed.notify_all()

    def set_version(self, version: int) -> None:
        with self._changed:
            self._version = version
            self._changed.notify_all()

    def take(self, worker: int, *, segment: int, pause: bool = False) -> Batch | Pause:
        """Return the next batch for a worker as soon as it may begin; a pause at the end of the segment.

        `segment` counts the segments that the worker has seen begin, from 1. With `pause` the segment ends after the
        steps that have begun.
        """
        with self._changed:
            self._wait(lambda: self._segment >= segment)
            assert self._segment == segment, "no worker misses a pause"
            if pause:
                self._end = min(self._end, -(-self._begun // self._num_workers) * self._num_workers)
                self._changed.notify_all()
            self._wait(lambda: self._begun >= self._end or self._may_begin())
            if self._begun >= self._end:
                return Pause(self._end // self._num_workers)
            batch = Batch(self._begun, self._version)
            self._begun += 1
            self._in_progress[worker] = batch.version
            return batch

    def finish(self, worker: int) -> int:
        """Return the number of the update that the gradient of a worker's batch belongs to, in the order of arrival."""
        with self._changed:
            del self._in_progress[worker]
            update = self._finished // self._num_workers
            self._finished += 1
            self._changed.notify_all()
            return update

    def _may_begin(self) -> bool:
        oldest = min([self._version, *self._in_progress.values()])
        return self._begun // self._num_workers <= oldest + self._staleness

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        while not self._changed.wait_for(is_ready, timeout=self._poll_seconds):
            self._check()


@dataclass(frozen=True, slots=True)
class RowShard:
    """The rows of a parameter that one server holds; a scalar is one row."""

    name: str
    parameter: nn.Parameter
    rows: slice

    def view(self, tensor: Tensor) -> Tensor:
        return tensor[self.rows] if tensor.ndim else tensor

    @property
    def start(self) -> tuple[int, ...]:
        """Where the rows begin in the parameter, for each dim."""
        return tuple(self.rows.start if dim == 0 else 0 for dim in range(self.parameter.ndim))


class ServerRows:
    """The rows of all trained parameters on one server, flat, in fp32, on the host. All have about as many."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], *, server: int, num_servers: int) -> None:
        self.shards: list[RowShard] = []
        for name, each in named:
            count = each.shape[0] if each.ndim else 1
            rows = slice(count * server // num_servers, count * (server + 1) // num_servers)
            if rows.start < rows.stop:
                self.shards.append(RowShard(name, each, rows))
        self._sizes = [each.view(each.parameter).numel() for each in self.shards]
        self.num_values = sum(self._sizes)

    @torch.no_grad()
    def flat_gradients(self) -> Tensor:
        held = [(each, each.parameter.grad) for each in self.shards]
        gradients = [(each, torch.zeros_like(each.parameter) if grad is None else grad) for each, grad in held]
        parts = [each.view(gradient).reshape(-1).float() for each, gradient in gradients]
        return torch.cat(parts).cpu() if parts else torch.empty(0)

    @torch.no_grad()
    def fill_weights(self, flat: Tensor) -> None:
        if not self.shards:
            return
        targets = [each.view(each.parameter.detach()) for each in self.shards]
        values = flat.to(targets[0].device, non_blocking=True).split(self._sizes)
        sources = [value.view(target.shape) for value, target in zip(values, targets, strict=True)]
        torch._foreach_copy_(targets, sources)

    def split(self, flat: Tensor) -> list[Tensor]:
        shapes = [each.view(each.parameter).shape for each in self.shards]
        return [part.view(shape) for part, shape in zip(flat.split(self._sizes), shapes, strict=True)]


@dataclass(frozen=True, slots=True)
class GradientFacts:
    """The facts that a worker sends with the gradient of a batch.

    `loss` is summed over its valid `tokens`. `update` is the number of the update that it belongs to, `version` that of
    the weights it was computed on. `seconds` are the worker's, by phase, in the order of PHASES.
    """

    update: int
    batch: int
    worker: int
    version: int
    tokens: int
    loss: float
    seconds: tuple[float, ...]

    @property
    def staleness(self) -> int:
        """How many updates were applied between the read of the weights and the update with this gradient."""
        return self.update - self.version


@dataclass(frozen=True, slots=True)
class AppliedUpdate:
    """One update, the same on every server: its numbers, and the batches that it is made of."""

    step: int
    lr: float
    loss: float
    grad_norm: float
    refused: bool
    refusal: RefusedStep | None
    batches: tuple[GradientFacts, ...]
    time: float = field(default_factory=time.time)


class ShardServer:
    """Holds rows of the weights in fp32 on the host; updates them once the gradients of a global batch have arrived.

    Gradients of one update are summed in the order of their batches, whoever arrives first. The servers of all ranks
    update one after another the same updates: they sum their squared norms in `group`, so that all clip by the norm of
    the whole gradient and refuse the same updates. Methods may be called by any thread; updates have a thread of their
    own, from `start` to `close`. Gradients are sums over tokens, divided by `divisor`.
    """

    def __init__(
        self,
        rows: ServerRows,
        parameters: Sequence[nn.Parameter],
        updater: Updater,
        train: TrainSection,
        mesh: Mesh,
        *,
        divisor: float,
        group: dist.ProcessGroup,
    ) -> None:
        self.rows, self.parameters, self._updater, self._train, self._mesh = rows, parameters, updater, train, mesh
        self._divisor, self._group = divisor, group
        self._samples_of: Callable[[int], Sequence[int]] = lambda batch: ()
        self._on_version: Callable[[int], None] = lambda version: None
        self._changed = threading.Condition()
        self._pushed: dict[int, list[tuple[GradientFacts, Tensor]]] = {}
        self._applied: list[AppliedUpdate] = []
        self._failure: BaseException | None = None
        self._closed, self._thread = True, threading.Thread()
        self.version = 0
        self.refusal: RefusedStep | None = None

    def start(
        self, version: int, samples_of: Callable[[int], Sequence[int]], on_version: Callable[[int], None]
    ) -> None:
        """Start to apply updates to weights that had `version` updates.

        `samples_of` returns the ids of the samples of a batch. `on_version` is called after each update.
        """
        self._samples_of, self._on_version = samples_of, on_version
        self.version, self.refusal, self._closed = version, None, False
        self._thread = threading.Thread(target=self._run, name="trimaran-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread of the updates. None may be in progress."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def fail(self, error: BaseException) -> None:
        """Make every method that waits raise: another thread of this rank has failed."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def check(self) -> None:
        """Raise if a thread of this rank has failed."""
        if self._failure is not None:
            raise RuntimeError(f"the parameter server failed: {self._failure}") from self._failure

    def push(self, facts: GradientFacts, gradients: Tensor) -> None:
        """Take the flat gradients of these rows for an update."""
        with self._changed:
            self._pushed.setdefault(facts.update, []).append((facts, gradients))
            self._changed.notify_all()

    @torch.no_grad()
    def pull(self, version: int) -> tuple[int, Tensor]:
        """Return the flat weights of these rows once at least `version` updates are applied, and how many are."""
        with self._changed:
            self._wait(lambda: self.version >= version)
            flat = [each.detach().reshape(-1) for each in self.parameters]
            return self.version, torch.cat(flat) if flat else torch.empty(0)

    def take_applied(self) -> list[AppliedUpdate]:
        with self._changed:
            applied, self._applied = self._applied, []
            return applied

    @torch.no_grad()
    def load_weights(self) -> None:
        for shard, each in zip(self.rows.shards, self.parameters, strict=True):
            each.copy_(shard.view(shard.parameter))

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._wait(lambda: self._closed or len(self._pushed.get(self.version, ())) == self._mesh.dp)
                    if self._closed:
                        return
                    pushed = self._pushed.pop(self.version)
                self._apply(sorted(pushed, key=lambda each: each[0].batch))
        except BaseException as error:
            self.fail(error)

    @torch.no_grad()
    def _apply(self, pushed: Sequence[tuple[GradientFacts, Tensor]]) -> None:
        """Apply one update. The weights change under the lock, so that a pull is of one version."""
        batches = tuple(facts for facts, _ in pushed)
        tokens, total = max(1, sum(each.tokens for each in batches)), pushed[0][1]
        for _, gradients in pushed[1:]:
            total += gradients
        total *= self._divisor / tokens
        for each, gradient in zip(self.parameters, self.rows.split(total), strict=True):
            each.grad = gradient
        # Each row is on one server, but the meter divides by the number of ranks, as for replicas.
        squares = self._updater.measure_gradients().cpu() * dist.get_world_size(self._group)
        dist.all_reduce(squares, group=self._group)
        loss, lr = sum(each.loss for each in batches) / tokens, learning_rate(self.version, self._train)
        with self._changed:  # a pull is of one version
            norms = self._updater.update(lr, torch.tensor(loss, dtype=torch.float64), squares)
            norm, refused, step = float(norms[0]), bool(norms[1]), self.version + 1
            numbers = StepNumbers(step=step, loss=loss, grad_norm=norm, refused=refused, suspects=())
            samples = tuple(sample for each in batches for sample in self._samples_of(each.batch)) if refused else ()
            refusal = self._updater.guard.read(numbers, self._mesh, lambda *_: samples, scaled=False)
            if refusal is not None and refusal.action != "skip":
                self.refusal = self.refusal or refusal
            self._applied.append(AppliedUpdate(step, lr, loss, norm, refused, refusal, batches))
            self.version = step
            self._changed.notify_all()
        self._on_version(step)

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._failure is not None or is_ready())
        self.check()


# Tags of messages. Both directions between two ranks are used at once, by different threads: no tag is used for both.
REQUEST, GRADIENTS = 1, 2  # from a worker to the threads of another rank
REPLY, WEIGHTS = 3, 4  # from such a thread to the worker
NUM_FIELDS = 16
NUM_REPLY_FIELDS = 2
# A worker may wait as long as the slowest one takes. The supervisor finds ranks that hang.
TIMEOUT = timedelta(days=30)


class ServerRequest(IntEnum):
    """What a worker asks of a rank; the first field of a request."""

    TAKE = 1  # segment, pause; answer: batch, version, or -1, step
    FINISH = 2  # answer: update, 0
    PUSH = 3  # the fields of GradientFacts; flat gradients follow
    PULL = 4  # version; answer: version, 0, and flat weights
    END = 5


def new_server_groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return a group for requests and one for the sums of the servers. Every rank must call it."""
    with closed_listeners():
        requests = dist.new_group(backend="gloo", timeout=TIMEOUT)
        updates = dist.new_group(backend="gloo", timeout=TIMEOUT)
    assert isinstance(requests, dist.ProcessGroup)
    assert isinstance(updates, dist.ProcessGroup)
    return requests, updates


class ServerConnections:
    """The requests of this rank's worker, and the threads that answer those of others. `counter` is on rank 0 only."""

    def __init__(
        self,
        server: ShardServer,
        rows: Sequence[ServerRows],
        *,
        rank: int,
        counter: BatchCounter | None,
        group: dist.ProcessGroup,
    ) -> None:
        """`rows` are those of each rank's server, in the order of ranks."""
        self._server, self._rows, self._rank, self._counter, self._group = server, rows, rank, counter, group
        self._others = [each for each in range(len(rows)) if each != rank]
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start to answer the requests of the other ranks."""
        self._threads = [
            threading.Thread(target=self._answer, args=(each,), name=f"trimaran-worker-{each}", daemon=True)
            for each in self._others
        ]
        for each in self._threads:
            each.start()

    def close(self) -> None:
        """End the threads, here and of this rank's worker on the others. Every rank must call it."""
        for each in [self._send(each, ServerRequest.END) for each in self._others]:
            each.wait()
        for each in self._threads:
            each.join()

    def take(self, *, segment: int, pause: bool) -> Batch | Pause:
        """See `BatchCounter.take`."""
        if self._counter is not None:
            return self._counter.take(self._rank, segment=segment, pause=pause)
        number, other = self._ask(ServerRequest.TAKE, segment, pause)
        return Pause(other) if number < 0 else Batch(number, other)

    def finish(self) -> int:
        """See `BatchCounter.finish`."""
        if self._counter is not None:
            return self._counter.finish(self._rank)
        return self._ask(ServerRequest.FINISH)[0]

    def push(self, facts: GradientFacts) -> None:
        """Send the gradients of the parameters to all servers."""
        fields = (facts.update, facts.batch, facts.worker, facts.version, facts.tokens, facts.loss, *facts.seconds)
        works, sent = [], [self._rows[each].flat_gradients() for each in self._others]
        for other, gradients in zip(self._others, sent, strict=True):
            works += [self._send(other, ServerRequest.PUSH, *fields), self._isend(gradients, other, GRADIENTS)]
        self._server.push(facts, self._server.rows.flat_gradients())
        for each in works:
            each.wait()

    def pull(self, version: int) -> int:
        """Fill the parameters with weights of at least `version` updates; return the lowest version of any server."""
        requests = [self._send(each, ServerRequest.PULL, version) for each in self._others]
        answers = []
        for other in self._others:
            reply, values = torch.zeros(NUM_REPLY_FIELDS, dtype=torch.int64), torch.empty(self._rows[other].num_values)
            works = self._irecv(reply, other, REPLY), self._irecv(values, other, WEIGHTS)
            answers.append((reply, values, works))
        lowest, mine = self._server.pull(version)
        self._server.rows.fill_weights(mine)
        for other, (reply, values, works) in zip(self._others, answers, strict=True):
            for each in works:
                each.wait()
            lowest = min(lowest, int(reply[0]))
            self._rows[other].fill_weights(values)
        for each in requests:
            each.wait()
        return lowest

    def _ask(self, request: ServerRequest, *fields: float) -> tuple[int, int]:
        reply = torch.zeros(NUM_REPLY_FIELDS, dtype=torch.int64)
        sent = self._send(0, request, *fields)
        dist.recv(reply, src=0, group=self._group, tag=REPLY)
        sent.wait()
        first, second = reply.tolist()
        return first, second

    def _send(self, rank: int, request: ServerRequest, *fields: float) -> "Sending":
        row = [float(request), *map(float, fields)]
        return self._isend(torch.tensor(row + [0.0] * (NUM_FIELDS - len(row)), dtype=torch.float64), rank, REQUEST)

    def _isend(self, values: Tensor, rank: int, tag: int) -> "Sending":
        return Sending(values, dist.isend(values, dst=rank, group=self._group, tag=tag))

    def _irecv(self, values: Tensor, rank: int, tag: int) -> "Sending":
        return Sending(values, dist.irecv(values, src=rank, group=self._group, tag=tag))

    def _answer(self, worker: int) -> None:
        """Answer the requests of one other rank until it ends; the thread of that rank."""
        try:
            row = torch.zeros(NUM_FIELDS, dtype=torch.float64)
            while True:
                dist.recv(row, src=worker, group=self._group, tag=REQUEST)
                request, *fields = row.tolist()
                values: Tensor | None = None
                if request == ServerRequest.END:
                    return
                if request == ServerRequest.PUSH:
                    gradients = torch.empty(self._server.rows.num_values)
                    dist.recv(gradients, src=worker, group=self._group, tag=GRADIENTS)
                    update, batch, own, version, tokens = map(int, fields[:5])
                    seconds = tuple(fields[6 : 6 + len(PHASES)])
                    facts = GradientFacts(update, batch, own, version, tokens, fields[5], seconds)
                    self._server.push(facts, gradients)
                    continue
                if request == ServerRequest.PULL:
                    version, values = self._server.pull(int(fields[0]))
                    reply = version, 0
                else:
                    assert self._counter is not None, "only rank 0 is asked for batches"
                    if request == ServerRequest.TAKE:
                        taken = self._counter.take(worker, segment=int(fields[0]), pause=bool(fields[1]))
                        reply = (taken.number, taken.version) if isinstance(taken, Batch) else (-1, taken.step)
                    else:
                        reply = self._counter.finish(worker), 0
                dist.send(torch.tensor(reply), dst=worker, group=self._group, tag=REPLY)
                if values is not None:
                    dist.send(values, dst=worker, group=self._group, tag=WEIGHTS)
        except BaseException as error:
            self._server.fail(error)


class Sending:
    """A message on its way. It keeps the tensor alive until it has been sent or received."""

    def __init__(self, values: Tensor, work: dist.Work | None) -> None:
        assert work is not None, "every rank is in the group"
        self._values, self._work = values, work

    def wait(self) -> None:
        self._work.wait()
