"""How workers reach the batch counter and the servers of all ranks: by point-to-point messages of gloo.

Requests are answered by a thread for each other rank, so that a slow link holds up nobody else. A message is a row of
numbers, and weights or gradients as a flat tensor. Nothing is pickled. A rank that dies closes its connections, which
raises on all ranks that talk to it.
"""

import threading
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.core import PHASES
from trimaran.runs.gloo_listeners import closed_listeners
from trimaran.train.features.async_sgd.batch_counter import Batch, BatchCounter, Pause
from trimaran.train.features.async_sgd.row_shards import ServerRows
from trimaran.train.features.async_sgd.shard_server import GradientFacts, ShardServer

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
        """Send a request to rank 0 and return its answer."""
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
                if request == ServerRequest.END:
                    return
                self._answer_one(worker, ServerRequest(int(request)), fields)
        except BaseException as error:
            self._server.fail(error)

    def _answer_one(self, worker: int, request: ServerRequest, fields: Sequence[float]) -> None:
        if request == ServerRequest.PUSH:
            gradients = torch.empty(self._server.rows.num_values)
            dist.recv(gradients, src=worker, group=self._group, tag=GRADIENTS)
            self._server.push(facts_of(fields), gradients)
            return
        values: Tensor | None = None
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


class Sending:
    """A message on its way. It keeps the tensor alive until it has been sent or received."""

    def __init__(self, values: Tensor, work: dist.Work | None) -> None:
        assert work is not None, "every rank is in the group"
        self._values, self._work = values, work

    def wait(self) -> None:
        self._work.wait()


def facts_of(fields: Sequence[float]) -> GradientFacts:
    """Return the facts that `ServerConnections.push` sends."""
    update, batch, worker, version, tokens, loss, *seconds = fields
    return GradientFacts(
        update=int(update),
        batch=int(batch),
        worker=int(worker),
        version=int(version),
        tokens=int(tokens),
        loss=loss,
        seconds=tuple(seconds[: len(PHASES)]),
    )
