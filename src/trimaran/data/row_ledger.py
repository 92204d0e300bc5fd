"""Which rows of the data elastic replicas have trained on, and who gets which until the next synchronisation.

A row is an index in the order of samples. It is consumed when a synchronisation takes up the weights of a replica that
trained on it. The rows of a replica that was lost before that are dealt out again, first of all.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from trimaran.data.feed import DataShare

Spans = tuple[tuple[int, int], ...]  # rows as ranges [start, stop), in order


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """The rows of each of `members` (replicas) in the steps after `first_step`: `rows_per_step` for each of them.

    Rows are taken from `returned`, those that were dealt before and not consumed, and then from `next_row` on. Steps
    after the next synchronisation are dealt as if nobody were lost until then, and nobody joined.
    """

    first_step: int
    members: tuple[int, ...]
    rows_per_step: int
    next_row: int
    returned: Spans = ()

    def rows(self, places: np.ndarray) -> np.ndarray:
        """Return the rows at these places, counted from the first row of this deal."""
        starts, stops = (np.array([span[end] for span in self.returned], dtype=np.int64) for end in (0, 1))
        ends = np.cumsum(stops - starts)
        num_returned = int(ends[-1]) if len(ends) else 0
        rows = self.next_row + places - num_returned
        if (again := places < num_returned).any():
            span = np.searchsorted(ends, places[again], side="right")
            rows[again] = stops[span] - (ends[span] - places[again])
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtShare(DataShare):
    """A rank's part of the rows that were dealt to its replica, `member`. `dp` and `rank` are those of the replica."""

    deal: Deal
    member: int

    @property
    def first_step(self) -> int:
        return self.deal.first_step

    def rows_of(self, steps: range, data_ranks: Sequence[int]) -> np.ndarray:
        deal = self.deal
        place, num_members = deal.members.index(self.member), len(deal.members)
        assert self.global_batch == deal.rows_per_step
        all_ranks = DataShare(
            rank=0, dp=num_members * self.dp, micro_batch=self.micro_batch, grad_accum=self.grad_accum
        )
        places = np.concatenate([all_ranks.of(place * self.dp + rank).indices(0).ravel() for rank in data_ranks])
        return deal.rows((np.array(steps)[:, None] - deal.first_step) * all_ranks.global_batch + places)


class RowLedger:
    """Deals out rows from one synchronisation to the next; every rank has the same. `state` is saved in checkpoints.

    `share` is the part of any rank in the rows of its replica.
    """

    def __init__(self, share: DataShare, *, global_batch: int) -> None:
        self._share, self._global_batch = share, global_batch
        self.next_row, self.returned = 0, Spans()
        self.deal: Deal | None = None

    def begin(self, step: int, members: Iterable[int]) -> None:
        """Deal out the rows from `step` on, after a start. A state that was saved without a ledger had no losses."""
        self.next_row = self.next_row or step * self._global_batch
        self._deal(step, members)

    def synchronise(self, step: int, contributors: Iterable[int], members: Iterable[int]) -> int:
        """Count the rows of `contributors` since the last deal as consumed, and deal out the next ones to `members`.

        Returns how many rows are dealt out again, because those who had them were lost.
        """
        deal, contributed = self._current, {*contributors}
        places = np.arange((step - deal.first_step) * len(deal.members) * deal.rows_per_step)
        lost = [each for each in deal.members if each not in contributed]
        steps = range(deal.first_step, step)
        all_ranks = range(self._share.dp)
        again = [self.dealt_share(each, self._share).rows_of(steps, all_ranks).ravel() for each in lost]
        num_returned = sum(stop - start for start, stop in deal.returned)
        left = deal.rows(np.arange(len(places), max(len(places), num_returned)))
        self.next_row = deal.next_row + max(0, len(places) - num_returned)
        self.returned = spans_of(np.concatenate([left, *again]))
        self._deal(step, members)
        return sum(len(each) for each in again)

    def dealt_share(self, member: int, share: DataShare) -> DealtShare:
        """Return the part of the rank with this share in the rows of its replica, `member`."""
        return DealtShare(
            rank=share.rank,
            dp=share.dp,
            micro_batch=share.micro_batch,
            grad_accum=share.grad_accum,
            deal=self._current,
            member=member,
        )

    def continues(self, before: Deal) -> bool:
        """Return whether the deal is what `before` said about the same steps, as batches loaded ahead need it."""
        deal = self._current
        if deal.members != before.members:
            return False
        step_rows = len(deal.members) * deal.rows_per_step
        skipped = (deal.first_step - before.first_step) * step_rows
        places = np.arange(step_rows + sum(stop - start for start, stop in deal.returned))
        return bool((deal.rows(places) == before.rows(places + skipped)).all())

    def state(self) -> dict[str, Any]:
        return {"next_row": self.next_row, "returned": [list(span) for span in self.returned]}

    def restore(self, state: Mapping[str, Any]) -> None:
        spans = tuple((int(start), int(stop)) for start, stop in state["returned"])
        is_ordered = all(a[1] <= b[0] for a, b in pairwise(spans)) and all(0 <= a < b for a, b in spans)
        if not is_ordered or int(state["next_row"]) < 0:
            raise ValueError("rows out of order")
        self.next_row, self.returned = int(state["next_row"]), spans

    @property
    def _current(self) -> Deal:
        assert self.deal is not None, "rows are dealt out at the start"
        return self.deal

    def _deal(self, step: int, members: Iterable[int]) -> None:
        self.deal = Deal(
            first_step=step,
            members=tuple(sorted(members)),
            rows_per_step=self._share.global_batch,
            next_row=self.next_row,
            returned=self.returned,
        )


def spans_of(rows: np.ndarray) -> Spans:
    """Return rows, which are all different, as ranges in order."""
    if not len(rows):
        return ()
    ordered = np.sort(rows)
    breaks = np.flatnonzero(np.diff(ordered) != 1)
    starts, stops = ordered[[0, *(breaks + 1)]], ordered[[*breaks, len(ordered) - 1]] + 1
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))
