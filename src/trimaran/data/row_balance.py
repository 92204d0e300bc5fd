"""Assigns the rows of a global batch to ranks and micro-steps by cost.

The assignment depends only on the row costs and the plan, so ranks do not communicate, and the set of rows in a batch
never changes. `row_packing` mixes expensive and cheap samples so that an even assignment exists.
"""

import numpy as np

from trimaran.data.feed import DataShare


def balance_rows(costs: np.ndarray, share: DataShare) -> np.ndarray:
    """Return the row of each slot [grad_accum, dp, micro_batch] of the batch.

    A micro-step takes rows of similar cost, because FSDP ranks wait for the slowest rank in each micro-step. The most
    expensive rows come first, so a batch that does not fit in memory fails at once. Within a micro-step, the most
    expensive row left goes to the rank with the lowest cost so far; the most expensive bundle goes to the rank with the
    lowest total over the previous micro-steps.
    """
    order = np.argsort(-costs, kind="stable").reshape(share.grad_accum, share.micro_batch, share.dp)
    assignment = np.empty((share.grad_accum, share.dp, share.micro_batch), dtype=np.int64)
    totals = np.zeros(share.dp)
    for micro_step, layers in enumerate(order):
        sums = np.zeros(share.dp)
        bundles = np.empty((share.dp, share.micro_batch), dtype=np.int64)
        for number, layer in enumerate(layers):
            cheapest = np.argsort(sums, kind="stable")
            bundles[cheapest, number] = layer
            sums[cheapest] += costs[layer]
        ranks, most_expensive = np.argsort(totals, kind="stable"), np.argsort(-sums, kind="stable")
        assignment[micro_step, ranks] = bundles[most_expensive]
        totals[ranks] += sums[most_expensive]
    return assignment


def sequential_rows(share: DataShare) -> np.ndarray:
    """Return the row of each slot [grad_accum, dp, micro_batch] without balancing."""
    return np.arange(share.global_batch).reshape(share.grad_accum, share.dp, share.micro_batch)


def slowest_rank_cost(costs: np.ndarray, assignment: np.ndarray) -> float:
    """Return the cost of the step's critical path: the sum over micro-steps of the slowest rank's cost."""
    return float(costs[assignment].sum(-1).max(-1).sum())
