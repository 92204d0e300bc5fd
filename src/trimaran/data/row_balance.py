"""Assigns the rows of a global batch to ranks and micro-steps by cost.

The assignment depends only on the row costs and the plan, so ranks do not communicate, and the set of rows in a batch
never changes. `row_packing` mixes expensive and cheap samples so that an even assignment exists.
"""

import numpy as np

from trimaran.data.feed import DataShare

NO_ROW = -1  # in a slot that a rank does not have


def balance_rows(costs: np.ndarray, share: DataShare) -> np.ndarray:
    """Return the row of each slot [grad_accum, dp, micro_batch] of the batch; NO_ROW where a rank has fewer slots.

    A micro-step takes rows of similar cost, because FSDP ranks wait for the slowest rank in each micro-step. The most
    expensive rows come first, so a batch that does not fit in memory fails at once. Within a micro-step, the most
    expensive row left goes to the rank with the lowest cost so far; the most expensive bundle goes to the rank with the
    lowest total over the previous micro-steps. Ranks with more slots are faster, and get more of the cost.
    """
    if share.rows:
        return _balance_unequal(costs, share)
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


def _balance_unequal(costs: np.ndarray, share: DataShare) -> np.ndarray:
    """Return `balance_rows` for ranks with different numbers of slots, which are in proportion to their speeds.

    The most expensive row left goes to the rank that would be the first to finish it.
    """
    order = np.argsort(-costs, kind="stable").reshape(share.grad_accum, share.rows_at_once)
    slots = np.array(share.rows)
    assignment = np.full((share.grad_accum, share.dp, int(slots.max())), NO_ROW, dtype=np.int64)
    for micro_step, rows in enumerate(order):
        sums, used = np.zeros(share.dp), np.zeros(share.dp, dtype=np.int64)
        for row in rows.tolist():
            rank = int(np.argmin(np.where(used < slots, (sums + costs[row]) / slots, np.inf)))
            assignment[micro_step, rank, used[rank]] = row
            sums[rank] += costs[row]
            used[rank] += 1
    return assignment


def sequential_rows(share: DataShare) -> np.ndarray:
    """Return the row of each slot [grad_accum, dp, micro_batch] without balancing; see `balance_rows`."""
    if not share.rows:
        return np.arange(share.global_batch).reshape(share.grad_accum, share.dp, share.micro_batch)
    assignment = np.full((share.grad_accum, share.dp, max(share.rows)), NO_ROW, dtype=np.int64)
    for rank, num in enumerate(share.rows):
        assignment[:, rank, :num] = share.of(rank).indices(0)
    return assignment


def rank_costs(costs: np.ndarray, assignment: np.ndarray) -> np.ndarray:
    """Return the cost of each rank in each micro-step, [grad_accum, dp]."""
    return np.append(costs, 0.0)[assignment].sum(-1)  # NO_ROW is the last, which costs nothing


def slowest_rank_cost(costs: np.ndarray, assignment: np.ndarray) -> float:
    """Return the cost of the step's critical path: the sum over micro-steps of the slowest rank's cost.

    A rank's cost is divided by its speed, relative to the mean: by its number of slots, relative to the mean.
    """
    num_slots = (assignment[0] != NO_ROW).sum(-1)
    return float((rank_costs(costs, assignment) * num_slots.mean() / num_slots).max(-1).sum())
