"""Measures at start how fast each data rank computes, and deals the rows of a micro-batch by it.

The measurement runs forward and backward of real rows and throws the gradients away. It changes neither weights, nor
buffers, nor random numbers, so a run trains as if the same rows had been given in the plan.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from trimaran.core import DEVICE_TRAITS, Plan, RowSeconds, UserError, deal_rows
from trimaran.data import Inputs, Loader, StepBatch, share_of
from trimaran.nets import Network, local_part
from trimaran.parallel import all_gather_json, autocast, gradient_sync
from trimaran.train.features.nonfinite_search import unchanged_buffers
from trimaran.train.loss.objective import Objective
from trimaran.train.metrics.router_stats import routing_counts
from trimaran.train.metrics.step_clock import StepClock
from trimaran.train.steppers.feature import Feature, Load, LoadContext
from trimaran.train.steppers.stepper import build_loss_function, end_lap_after_backward, time_fsdp_gathers

MAX_ROUNDS = 2  # the first with equal rows; the second with those dealt after it, which take other time per row
MEASURED_SECONDS = 2.0  # of each round. A CPU quota applies to periods of 0.1 s: a short measurement would not see it
MAX_PASSES = 64
MEMORY_FRACTION = 0.92  # of a GPU, that weights, states and activations may fill
MAX_EVENT_RANKS = 1024  # data ranks that the event lists


class RoundTime(NamedTuple):
    """What a data rank measured in one round: its rows, the seconds of a micro-batch, and the most rows that fit."""

    rows: int
    seconds: float
    most: int | None = None


def with_measured_rows(load: Load, context: LoadContext) -> Plan:
    """Return the plan with the rows of each data rank, by the speeds that are measured now. Every rank must call it."""
    plan = context.plan
    rounds: list[list[RoundTime]] = []
    rows = (plan.micro_batch,) * plan.mesh.dp
    for _ in range(MAX_ROUNDS):
        rounds.append(_measure_round(_with_rows(plan, rows), load, context))
        dealt = rows_by_speed(rounds, plan.rows_at_once)
        if dealt == rows:
            break
        rows = dealt
    if plan.compile:
        torch._dynamo.reset()  # code for several shapes would differ from that for the final one
    per_row = [last.seconds / last.rows for last in rounds[-1]]
    context.journal.event("rows", micro_batches=[*rows[:MAX_EVENT_RANKS]], rounds=len(rounds),
                          seconds_per_row=[round(each, 6) for each in per_row[:MAX_EVENT_RANKS]])  # fmt: skip
    return _with_rows(plan, rows)


def rows_by_speed(rounds: Sequence[Sequence[RoundTime]], total: int) -> tuple[int, ...]:
    """Return the rows of each data rank for which the slowest takes the least time; or raise UserError."""
    by_rank = [*zip(*rounds, strict=True)]
    most = [min((each.most for each in measured if each.most is not None), default=None) for measured in by_rank]
    rows = deal_rows(total, [seconds_of(measured) for measured in by_rank], most)
    if rows is None:
        room = sum(each or 0 for each in most)
        raise UserError("P024.data-ranks-memory", where="plan.micro_batches", room=room, total=total)
    return rows


def seconds_of(measured: Sequence[RoundTime]) -> RowSeconds:
    """Return the seconds of a rank for some rows: in proportion, by all that it measured.

    A line through two rounds of similar rows would follow whatever disturbed one of them.
    """
    per_row = sum(each.seconds for each in measured) / sum(each.rows for each in measured)
    return lambda rows: per_row * rows


def _with_rows(plan: Plan, rows: tuple[int, ...]) -> Plan:
    return plan.model_copy(update={"micro_batches": rows, "micro_batch": max(rows)})


def _measure_round(plan: Plan, load: Load, context: LoadContext) -> list[RoundTime]:
    share, device, network = share_of(plan, context.ranks.data_rank), context.ranks.device, context.networks[0]
    data = load(share)
    with Loader(data.training(frozenset()), steps=1) as loader:
        batch = next(loader).to(device)
    devices: list[Any] = [device] if DEVICE_TRAITS[device.type].has_own_generator else []
    with unchanged_buffers([network]), torch.random.fork_rng(devices=devices):
        network.module.train()
        passes = _Passes(plan, network, batch, data.objective, device, context.report_progress)
        seconds, most = passes.measure(share.micro_batch)
    # A data rank is as fast as the slowest of the ranks that share its batch.
    answers: list[tuple[int, float, int | None]] = all_gather_json([share.rank, seconds, most])
    slowest = [max(each[1] for each in answers if each[0] == data_rank) for data_rank in range(share.dp)]
    least = [min((each[2] for each in answers if each[0] == data_rank and each[2] is not None), default=None)
             for data_rank in range(share.dp)]  # fmt: skip
    return [RoundTime(*each) for each in zip(share.rows_by_rank, slowest, least, strict=True)]


class _Passes:
    """Forward and backward of the micro-batches of one step, again and again, without their gradients."""

    def __init__(
        self,
        plan: Plan,
        network: Network,
        batch: StepBatch,
        objective: Objective,
        device: torch.device,
        report_progress: Callable[[], None],
    ) -> None:
        self._plan, self._network, self._device, self._batch = plan, network, device, batch
        self._report_progress, self._clock = report_progress, StepClock(device)
        self._losses = build_loss_function(objective, network, plan)
        time_fsdp_gathers(network, plan)
        # Replicas keep their gradients to themselves: a fast one must not wait for a slow one.
        self._reduces = plan.sharding != "none"
        self._set_sync = gradient_sync(network.module, plan)

    def measure(self, rows: int) -> tuple[float, int | None]:
        """Return the mean seconds of a micro-batch, and how many rows fit into memory, if that is known."""
        most: int | None = None
        if DEVICE_TRAITS[self._device.type].has_own_memory:
            # A GPU's memory beside all that does not depend on the rows.
            before = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._run(self._batch.micro(0))
            peak = torch.cuda.max_memory_allocated(self._device)
            held = (each.grad for each in self._network.module.parameters())
            gradients = sum(local_part(each).nbytes for each in held if each is not None)
            self._clear()
            prediction = self._plan.prediction
            states = sum(prediction.memory.get(term, 0) for term in ("masters", "optimizer")) if prediction else 0
            total = MEMORY_FRACTION * torch.cuda.get_device_properties(self._device).total_memory
            most = rows_in(total - before - gradients - states, rows, row_bytes=peak - before - gradients)
        else:
            self._time(1)
        self._time(1)  # the first backward after it may still allocate
        slowest = max(all_gather_json(self._time(1)))
        count = min(MAX_PASSES, max(1, math.ceil(MEASURED_SECONDS / max(slowest, 1e-9))))
        return self._time(count), most

    def _time(self, count: int) -> float:
        """Return the mean seconds of `count` micro-batches, without waiting for other data ranks."""
        self._clock.restart()
        for index in range(count):
            self._run(self._batch.micro(index % self._plan.grad_accum))
        phases = self._clock.end_step()().phases
        self._clear()
        return (phases["forward"] + phases["backward"]) / count

    def _run(self, inputs: Inputs) -> None:
        self._set_sync(self._reduces)
        self._clock.time_waits()
        with autocast(self._plan, self._device):
            losses, balance = self._losses(inputs)
        self._clock.lap("forward")
        loss = losses.total + balance
        self._clock.lap("comm")
        end_lap_after_backward(loss, self._clock)
        loss.backward()
        self._clock.lap("comm")
        self._report_progress()

    def _clear(self) -> None:
        for parameter in self._network.module.parameters():
            parameter.grad = None
        routing_counts([self._network], self._device)


def rows_in(free_bytes: float, rows: int, *, row_bytes: float) -> int:
    """Return how many rows fit into `free_bytes`, if `rows` of them need `row_bytes`; at least 1."""
    return max(1, int(free_bytes * rows / max(1.0, row_bytes)))


class MeasuredRows(Feature):
    """Deals the rows of a micro-batch by the speeds of the data ranks."""

    def wrap_load(self, load: Load, context: LoadContext) -> Load:
        return lambda share: load(share_of(with_measured_rows(load, context), share.rank))


FEATURE = MeasuredRows()
