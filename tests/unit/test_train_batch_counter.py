"""The counter of asynchronous batches: none is lost or given twice, and no gradient is staler than the bound."""

import random

import pytest

from trimaran.train import Batch, BatchCounter, Pause


class BlockedError(Exception):
    """The call would wait for another worker."""


def blocked() -> None:
    raise BlockedError


def counter_of(num_workers: int, staleness: int, *, start: int = 0, end: int = 100) -> BatchCounter:
    counter = BatchCounter(num_workers=num_workers, staleness=staleness, check=blocked, poll_seconds=0.0)
    counter.open(start=start, end=end)
    return counter


def test_without_staleness_the_next_step_begins_after_the_update() -> None:
    counter = counter_of(2, 0)
    assert [counter.take(worker, segment=1) for worker in range(2)] == [Batch(0, 0), Batch(1, 0)]
    assert counter.finish(1) == 0
    with pytest.raises(BlockedError):
        counter.take(1, segment=1)
    assert counter.finish(0) == 0
    with pytest.raises(BlockedError):  # both gradients have arrived, but are not applied
        counter.take(1, segment=1)
    counter.set_version(1)
    assert counter.take(1, segment=1) == Batch(2, 1)


@pytest.mark.parametrize(("staleness", "ahead"), [(0, 1), (1, 3), (4, 9)])
def test_a_fast_worker_runs_ahead_up_to_the_bound(staleness: int, ahead: int) -> None:
    """Worker 0 has batch 0 and does not finish it; updates of two batches each are made of those of worker 1."""
    counter = counter_of(2, staleness)
    counter.take(0, segment=1)
    done = 0
    while True:
        try:
            counter.take(1, segment=1)
        except BlockedError:
            break
        done += 1
        counter.finish(1)
        counter.set_version(done // 2)
    assert done == ahead
    assert counter.finish(0) == staleness, "its gradient is exactly as stale as the bound allows"


@pytest.mark.parametrize("seed", range(20))
def test_every_batch_is_taken_once_and_no_gradient_is_too_stale(seed: int) -> None:
    draw = random.Random(seed)
    num_workers, staleness, steps = draw.randint(1, 5), draw.randint(0, 4), 30
    counter = counter_of(num_workers, staleness, end=steps)
    speeds = [draw.random() ** 3 + 0.01 for _ in range(num_workers)]
    holds: dict[int, Batch] = {}
    paused: set[int] = set()
    taken: list[int] = []
    arrived = [0] * steps
    version = 0
    while len(paused) < num_workers:
        (worker,) = draw.choices(range(num_workers), weights=speeds)
        if worker in holds:
            batch, update = holds.pop(worker), counter.finish(worker)
            assert 0 <= update - batch.version <= staleness
            arrived[update] += 1
        elif worker not in paused:
            try:
                found = counter.take(worker, segment=1)
            except BlockedError:
                found = None
            if isinstance(found, Batch):
                holds[worker] = found
                taken.append(found.number)
            elif found is not None:
                paused.add(worker)
        if draw.random() < 0.5 and version < steps and arrived[version] == num_workers:
            version += 1
            counter.set_version(version)
    assert taken == [*range(steps * num_workers)]
    assert arrived == [num_workers] * steps


def test_a_request_to_pause_ends_the_segment_after_the_steps_that_have_begun() -> None:
    counter = counter_of(2, 4, end=10)
    assert counter.take(0, segment=1) == Batch(0, 0)
    assert counter.take(1, segment=1, pause=True) == Batch(1, 0)  # step 0 has begun, and is completed
    counter.finish(0)
    assert counter.take(0, segment=1) == Pause(1)
    counter.finish(1)
    assert counter.take(1, segment=1) == Pause(1)
    with pytest.raises(BlockedError):  # until rank 0 opens the next one
        counter.take(0, segment=2)
    counter.open(start=1, end=1)
    assert counter.take(0, segment=2) == Pause(1), "a segment may be empty"
