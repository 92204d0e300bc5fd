"""Which blocks of queries and keys each rank of a ring computes, and which keys it sends and receives for them.

A sequence is split into two equal chunks per rank; rank r holds chunks r and 2n - 1 - r, in this order. So its local
positions are in the order of the sequence, and with causal attention all ranks compute equally much. Between two ranks
one rectangle for each row is left: the queries of a reader attend to all keys of the owner that are in the same
document, because no other document has a part on both sides of the gap between them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

Span = tuple[int, int]  # from the first local position to the one after the last
TILE = 1024  # queries and keys whose scores are computed at a time where no kernel does it


@dataclass(frozen=True, slots=True)
class RingChunks:
    """The number of ranks of a ring, and the positions of one of the 2 chunks of each."""

    num_ranks: int
    chunk: int

    def position(self, rank: int, local: int) -> int:
        return local + (rank if local < self.chunk else 2 * self.num_ranks - 2 - rank) * self.chunk

    def num_before(self, rank: int, position: int) -> int:
        """Return how many of the rank's positions are before this one of the sequence."""
        back = (2 * self.num_ranks - 1 - rank) * self.chunk
        return sum(min(max(position - start, 0), self.chunk) for start in (rank * self.chunk, back))


@dataclass(frozen=True, slots=True)
class Rectangle:
    """The queries of a row that attend to the same keys, or causally to themselves; row None means all rows."""

    row: int | None
    queries: Span
    keys: Span


@dataclass(frozen=True, slots=True)
class RingStep:
    """What a rank does with the keys of the rank that is `shift` before it, and sends to the one that is as far ahead.

    `received` and `sent` are local positions of the keys' owner. The keys of `rectangles` count from the first one that
    was received.
    """

    shift: int
    rectangles: tuple[Rectangle, ...]
    received: Span
    sent: Span


@dataclass(frozen=True, slots=True)
class RingLayout:
    """The work of one rank: causal rectangles of its own keys, then steps in which some ranks exchange keys."""

    ring: RingChunks
    rank: int
    own: tuple[Rectangle, ...]
    steps: tuple[RingStep, ...]


@lru_cache(maxsize=256)
def ring_layout(
    lengths: tuple[int, ...], shape: tuple[int, int], ring: RingChunks, rank: int, window: int | None
) -> RingLayout:
    """Return the layout for rows and local positions of `shape`.

    `lengths` are those of the documents, row after row; empty if each row is one. Every rank finds the same shifts that
    need an exchange. With a `window`, queries attend to that many keys, their own position included.
    """
    rows, seq_len, ends = shape[0], ring.num_ranks * shape[1], [*accumulate(lengths)]
    assert not ends or ends[-1] == rows * seq_len, "documents fill all rows"
    documents: list[list[Span]] = [[] if lengths else [(0, seq_len)] for _ in range(rows)]
    for end, length in zip(ends, lengths, strict=True):
        row = (end - 1) // seq_len
        documents[row].append((end - length - row * seq_len, end - row * seq_len))
    steps = []
    for shift in range(1, ring.num_ranks):
        pairs = [_pair(documents, ring, (reader, (reader - shift) % ring.num_ranks), window)
                 for reader in range(ring.num_ranks)]  # fmt: skip
        if any(pairs):
            received, sent = _span(pairs[rank]), _span(pairs[(rank + shift) % ring.num_ranks])
            first = received[0]
            shifted = [replace(each, keys=(each.keys[0] - first, each.keys[1] - first)) for each in pairs[rank]]
            steps.append(RingStep(shift, _joined(shifted, rows), received, sent))
    own = []  # causal rectangles of the rank's own keys: one for each document that it has a part of
    for row, spans in enumerate(documents):
        for start, end in spans:
            local = ring.num_before(rank, start), ring.num_before(rank, end)
            if local[0] < local[1]:
                own.append(Rectangle(row, local, local))
    return RingLayout(ring, rank, _joined(own, rows), tuple(steps))


def tiles(
    rectangle: Rectangle, ring: RingChunks, ranks: tuple[int, int], first_key: int, window: int | None
) -> Iterator[tuple[Rectangle, bool]]:
    """Yield the parts of a rectangle of at most TILE x TILE in which some query attends, and whether a mask is needed.

    `ranks` are the reader and the owner, `first_key` the owner's local position that the rectangle's keys count from.
    """
    for queries in _tile_spans(rectangle.queries):
        first, last = (ring.position(ranks[0], each) for each in (queries[0], queries[1] - 1))
        for keys in _tile_spans(rectangle.keys):
            low, high = (ring.position(ranks[1], first_key + each) for each in (keys[0], keys[1] - 1))
            if low <= last and (window is None or first - high < window):
                is_masked = high > first or (window is not None and last - low >= window)
                yield Rectangle(rectangle.row, queries, keys), is_masked


def _tile_spans(span: Span) -> Iterator[Span]:
    yield from ((start, min(start + TILE, span[1])) for start in range(*span, TILE))


def _pair(documents: list[list[Span]], ring: RingChunks, ranks: Span, window: int | None) -> list[Rectangle]:
    """Return the rectangles of a reader's queries and an owner's keys, at most one for each row.

    The front chunk of an earlier owner is before all queries, its back chunk behind all of them. A later owner's
    chunks are both between the reader's, so only the back chunk of queries attends to them.
    """
    reader, owner = ranks
    is_earlier = owner < reader
    first_query = ring.position(reader, 0 if is_earlier else ring.chunk)
    last_key = ring.position(owner, ring.chunk - 1 if is_earlier else 2 * ring.chunk - 1)
    found = []
    for row, spans in enumerate(documents):
        start, end = next(span for span in spans if span[1] > first_query)
        if window is not None:
            start, end = max(start, first_query - window + 1), min(end, last_key + window)
        if start <= last_key and first_query < end:
            queries = ring.num_before(reader, first_query), ring.num_before(reader, end)
            keys = ring.num_before(owner, start), ring.num_before(owner, last_key + 1)
            found.append(Rectangle(row, queries, keys))
    return found


def _span(rectangles: list[Rectangle]) -> Span:
    """Return the keys that any of the rectangles needs."""
    if not rectangles:
        return 0, 0
    return min(each.keys[0] for each in rectangles), max(each.keys[1] for each in rectangles)


def _joined(rectangles: list[Rectangle], rows: int) -> tuple[Rectangle, ...]:
    """Return one rectangle for all rows if each has the same one."""
    if len(rectangles) == rows and len({(each.queries, each.keys) for each in rectangles}) == 1:
        return (Rectangle(None, rectangles[0].queries, rectangles[0].keys),)
    return tuple(rectangles)
