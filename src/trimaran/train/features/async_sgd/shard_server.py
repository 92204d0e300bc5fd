"""The parameter server of one rank: some rows of every parameter, their optimizer, and the thread that updates them."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimaran.core import Mesh, TrainSection
from trimaran.parallel.optimizer.schedule import learning_rate
from trimaran.train.features.async_sgd.row_shards import ServerRows
from trimaran.train.health.guard import RefusedStep, StepNumbers
from trimaran.train.steppers.update import Updater


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFacts:
    """What a worker sends with the gradient of a batch: `loss` is summed over its valid `tokens`.

    `update` is the number of the update that it belongs to, `version` that of the weights it was computed on. `seconds`
    are the worker's, by phase, in the order of PHASES.
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


@dataclass(frozen=True, slots=True, kw_only=True)
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
        """Return the updates that were applied since the last call, in order."""
        with self._changed:
            applied, self._applied = self._applied, []
            return applied

    @torch.no_grad()
    def load_weights(self) -> None:
        """Copy the weights of the module, after they were restored."""
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
        with self._changed:
            norm, refused = self._updater.update(lr, torch.tensor(loss, dtype=torch.float64), squares)
            self._record(batches, lr=lr, loss=loss, norm=float(norm), refused=bool(refused))
            self.version += 1
            self._changed.notify_all()
        self._on_version(self.version)

    def _record(
        self, batches: tuple[GradientFacts, ...], *, lr: float, loss: float, norm: float, refused: bool
    ) -> None:
        step = self.version + 1
        numbers = StepNumbers(step=step, loss=loss, grad_norm=norm, refused=refused, suspects=())
        samples = tuple(sample for each in batches for sample in self._samples_of(each.batch)) if refused else ()
        refusal = self._updater.guard.read(numbers, self._mesh, lambda *_: samples, scaled=False)
        if refusal is not None and refusal.action != "skip":
            self.refusal = self.refusal or refusal
        update = AppliedUpdate(
            step=step, lr=lr, loss=loss, grad_norm=norm, refused=refused, refusal=refusal, batches=batches
        )
        self._applied.append(update)

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._failure is not None or is_ready())
        self.check()
