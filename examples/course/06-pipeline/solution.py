"""How many micro-batches make the bubble smaller than 10 %: `python examples/course/06-pipeline/solution.py`."""

from lesson import bubble_of, one_f_one_b, simulate

LIMIT, RANKS = 0.1, 4


def fewest(bubble):
    """Return the smallest number of micro-batches with a bubble below the limit, and its bubble."""
    micro_batches = 1
    while bubble(micro_batches) >= LIMIT - 1e-9:
        micro_batches += 1
    return micro_batches, bubble(micro_batches)


def main():
    schedules = {
        "1f1b, simulated": lambda m: bubble_of(simulate(one_f_one_b, RANKS, m), RANKS, m),
        "1f1b, (p-1)/(m+p-1)": lambda m: (RANKS - 1) / (m + RANKS - 1),
        "zero-bubble, (p-1)/(6m+p-1)": lambda m: (RANKS - 1) / (6 * m + RANKS - 1),
    }
    for name, bubble in schedules.items():
        micro_batches, reached = fewest(bubble)
        print(f"{name:<28} {micro_batches:>2} micro-batches: {reached:.1%}")


if __name__ == "__main__":
    main()
