"""The order in which each rank of a pipeline computes, for every schedule that our trainer has.

The trainer runs torch's schedules (`parallel/axes/pp.py`). This is the same order without torch, so that a laptop can
simulate it; `tests/unit/test_simulate_pipeline.py` compares both, and with the order of a real run.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from trimaran.models import stages_of_rank

Kind = Literal["forward", "backward", "input_grad", "weight_grad"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]


class Pass(NamedTuple):
    """One pass of a micro-batch through a stage. The zero-bubble schedule splits `backward` into its two halves.

    holds: the rank waits until the neighbour has received the result. 1F1B sends a result and receives the next input
        in one call, so it does; the other schedules compute on.
    """

    kind: Kind
    stage: int
    micro_batch: int
    holds: bool = False


class Order(NamedTuple):
    """A schedule: the passes of each rank, and who holds which stage.

    posts_early: ranks post their receives long before they need the input, so a message leaves when it is computed.
        Otherwise it leaves when the receiver waits for it.
    """

    passes: tuple[tuple[Pass, ...], ...]
    rank_of_stage: tuple[int, ...]
    posts_early: bool

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)


def pipeline_order(schedule: Schedule, *, ranks: int, num_stages: int, micro_batches: int) -> Order:
    """Return the order of a schedule. One rank alternates forward and backward, as gradient accumulation does."""
    owners = {stage: rank for rank in range(ranks) for stage in stages_of_rank(schedule, ranks, rank, num_stages)}
    rank_of_stage = tuple(owners[stage] for stage in range(num_stages))
    if ranks == 1:
        alternating = ((Pass("forward", 0, number), Pass("backward", 0, number)) for number in range(micro_batches))
        return Order((tuple(each for pair in alternating for each in pair),), (0,), posts_early=True)
    match schedule:
        case "gpipe":  # all forwards, then all backwards
            kinds: tuple[Kind, ...] = ("forward", "backward")
            passes = [
                [Pass(kind, rank, number) for kind in kinds for number in range(micro_batches)] for rank in range(ranks)
            ]
        case "1f1b":
            passes = [_one_forward_one_backward(rank, ranks, micro_batches) for rank in range(ranks)]
        case "interleaved":
            rounds = num_stages // ranks
            passes = [_interleaved(rank, ranks, rounds, micro_batches) for rank in range(ranks)]
        case "zero-bubble":
            passes = [_zero_bubble(rank, ranks, micro_batches) for rank in range(ranks)]
    return Order(tuple(map(tuple, passes)), rank_of_stage, posts_early=schedule in ("interleaved", "zero-bubble"))


def _one_forward_one_backward(rank: int, ranks: int, count: int) -> Iterator[Pass]:
    """Yield one forward for every later rank and the own one, then one backward and one forward in turn.

    From the last of the first forwards to the last forward of all, a rank sends and receives in one call.
    """
    first = min(count, ranks - rank)
    for number in range(first):
        yield Pass("forward", rank, number, holds=number == first - 1)
    for number in range(count):
        has_forward = first + number < count
        yield Pass("backward", rank, number, holds=has_forward)
        if has_forward:
            yield Pass("forward", rank, first + number, holds=True)


def _interleaved(rank: int, ranks: int, rounds: int, count: int) -> Iterator[Pass]:
    """Yield the passes of Megatron's interleaved schedule: groups of micro-batches go through one stage after another.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021.
    """
    group = count // max(1, count // ranks)  # micro-batches that enter a stage before the rank's next stage begins
    total = rounds * count
    first = min(total, (rounds - 1) * group + 2 * (ranks - 1 - rank))
    done: dict[tuple[Kind, int], int] = {}

    def next_pass(kind: Kind, turn: int) -> Pass:
        local = turn // group % rounds
        stage = (local if kind == "forward" else rounds - 1 - local) * ranks + rank
        number = done.get((kind, stage), 0)
        done[kind, stage] = number + 1
        return Pass(kind, stage, number)

    for turn in range(first):
        yield next_pass("forward", turn)
    for turn in range(total):
        if first + turn < total:
            yield next_pass("forward", first + turn)
        yield next_pass("backward", turn)


def _zero_bubble(rank: int, ranks: int, count: int) -> Iterator[Pass]:
    """Yield the passes of ZB-V, in which weight gradients fill the gaps.

    Each rank has two stages. The first ones are in the order of the ranks, the second ones in reverse order. Qi et al.,
    "Zero Bubble Pipeline Parallelism", 2023, section 6. With fewer micro-batches than fill the pipeline, the same order
    without the missing ones.
    """
    stages = rank, 2 * ranks - 1 - rank
    done: dict[tuple[Kind, int], int] = {}
    for kind, index in _zero_bubble_order(rank, ranks, max(2 * ranks - 1, count)):
        number = done.get((kind, index), 0)
        done[kind, index] = number + 1
        if number < count:
            yield Pass(kind, stages[index], number)


def _zero_bubble_order(rank: int, ranks: int, count: int) -> Iterator[tuple[Kind, int]]:
    """Yield what ZB-V computes, and for which of the rank's two stages: 0 or 1."""
    warmup, turns = 2 * ranks - 1 - rank, ranks - rank
    forward_0: list[tuple[Kind, int]] = [("forward", 0)]
    forward_1: list[tuple[Kind, int]] = [("forward", 1)]
    input_0: list[tuple[Kind, int]] = [("input_grad", 0)]
    input_1: list[tuple[Kind, int]] = [("input_grad", 1)]
    weight_0: list[tuple[Kind, int]] = [("weight_grad", 0)]
    weight_1: list[tuple[Kind, int]] = [("weight_grad", 1)]
    backward_0, backward_1 = input_0 + weight_0, input_1 + weight_1
    yield from forward_0 * (warmup - rank)
    yield from (forward_1 + forward_0) * rank
    yield from (forward_1 + backward_1) * turns
    yield from (forward_0 + backward_0 + forward_1 + backward_1) * (count - warmup)
    yield from (backward_0 + forward_1 + backward_1) * (warmup - ranks)
    yield from (input_0 + input_1) * rank
    yield from backward_0 * turns
    yield from weight_1 * rank
    yield from weight_0 * rank
