"""Two pipeline schedules, pass by pass: `python examples/course/06-pipeline/lesson.py`.

With a run directory: the bubble that the run measured, beside the one in theory.
"""

import json
import sys
from pathlib import Path

FORWARD, BACKWARD = 1, 2  # units of time: backward does twice the work
RANKS, MICRO_BATCHES = 4, 8


def gpipe(rank, ranks, micro_batches):
    """Return the passes of a rank in order: all forwards, then all backwards."""
    return [(kind, each) for kind in "FB" for each in range(micro_batches)]


def one_f_one_b(rank, ranks, micro_batches):
    """Return the passes of a rank: forwards until the first gradient can come back, then one backward each."""
    early = min(micro_batches, ranks - 1 - rank)
    passes = [("F", each) for each in range(early)]
    for each in range(micro_batches):
        passes += [("F", early + each)] if early + each < micro_batches else []
        passes += [("B", each)]
    return passes


def simulate(schedule, ranks, micro_batches):
    """Return {(rank, kind, micro-batch): start}. A pass waits for its rank, and for its input from a neighbour."""
    waiting = [schedule(rank, ranks, micro_batches) for rank in range(ranks)]
    free, starts, ends = [0] * ranks, {}, {}
    while any(waiting):
        for rank in range(ranks):
            while waiting[rank]:
                kind, each = waiting[rank][0]
                source = rank - 1 if kind == "F" else rank + 1
                if 0 <= source < ranks and (source, kind, each) not in ends:
                    break
                start = max(free[rank], ends.get((source, kind, each), 0))
                free[rank] = start + (FORWARD if kind == "F" else BACKWARD)
                starts[rank, kind, each], ends[rank, kind, each] = start, free[rank]
                waiting[rank].pop(0)
    return starts


def bubble_of(starts, ranks, micro_batches):
    """Return the fraction of the time in which ranks wait."""
    total = max(start + (FORWARD if kind == "F" else BACKWARD) for (_, kind, _), start in starts.items())
    return 1 - micro_batches * (FORWARD + BACKWARD) / total


def most_held(starts, rank):
    """Return how many micro-batches a rank holds activations of at once: forwards done, backwards not begun."""
    order = sorted((start, kind) for (at, kind, _), start in starts.items() if at == rank)
    held = most = 0
    for _, kind in order:
        held += 1 if kind == "F" else -1
        most = max(most, held)
    return most


def draw(starts, ranks):
    for rank in range(ranks):
        line = {}
        for (at, kind, each), start in starts.items():
            if at == rank:
                line |= dict.fromkeys(range(start, start + (FORWARD if kind == "F" else BACKWARD)), f"{kind}{each}")
        print(f"rank {rank} |" + " ".join(line.get(time, "  ") for time in range(max(line) + 1)))


def show_run(folder):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    measured = [line["bubble"]["measured"] for line in lines[1:]]  # the first step warms up
    print(f"bubble in theory {lines[0]['bubble']['theoretical']:.1%}, measured {sum(measured) / len(measured):.1%}")


def main():
    for schedule in (gpipe, one_f_one_b):
        starts = simulate(schedule, RANKS, MICRO_BATCHES)
        bubble = bubble_of(starts, RANKS, MICRO_BATCHES)
        print(f"{schedule.__name__}: bubble {bubble:.1%}, rank 0 holds {most_held(starts, 0)} micro-batches")
        draw(starts, RANKS)
    print(f"(p-1) / (m+p-1) = {(RANKS - 1) / (MICRO_BATCHES + RANKS - 1):.1%}")


if __name__ == "__main__":
    show_run(sys.argv[1]) if len(sys.argv) > 1 else main()
