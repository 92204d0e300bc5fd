"""The rows of a global batch dealt out by cost to ranks and micro-steps.

It is a function of what the rows cost and of the plan: no rank asks another, and which rows form the batch never
changes. That rows can be dealt evenly at all is the work of `chart`, which mixes dear samples with cheap ones.
"""

import numpy as np

from trimaran.data.feed import DataShare


def deal_rows(costs: np.ndarray, share: DataShare) -> np.ndarray:
    """Return which row each place [grad_accum, dp, micro_batch] of the batch takes.

    A micro-step takes rows of about one cost, because ranks that gather weights move in step: each waits for the
    slowest. The dearest come first, so what does not fit fails at once. Inside it the dearest row left goes to the rank
    with the cheapest so far, and the dearest rank's share to the one that has the least of all micro-steps before.
    """
    order = np.argsort(-costs, kind="stable").reshape(share.grad_accum, share.micro_batch, share.dp)
    places = np.empty((share.grad_accum, share.dp, share.micro_batch), dtype=np.int64)
    totals = np.zeros(share.dp)
    for micro_step, layers in enumerate(order):
        sums = np.zeros(share.dp)
        bundles = np.empty((share.dp, share.micro_batch), dtype=np.int64)
        for number, layer in enumerate(layers):
            cheapest = np.argsort(sums, kind="stable")
            bundles[cheapest, number] = layer
            sums[cheapest] += costs[layer]
        ranks, dearest = np.argsort(totals, kind="stable"), np.argsort(-sums, kind="stable")
        places[micro_step, ranks] = bundles[dearest]
        totals[ranks] += sums[dearest]
    return places


def in_order(share: DataShare) -> np.ndarray:
    """Return which row each place [grad_accum, dp, micro_batch] takes when nothing is balanced."""
    return np.arange(share.global_batch).reshape(share.grad_accum, share.dp, share.micro_batch)


def slowest(costs: np.ndarray, places: np.ndarray) -> float:
    """Return what a rank has to wait for: of every micro-step the cost of its slowest rank, in sum."""
    return float(costs[places].sum(-1).max(-1).sum())
