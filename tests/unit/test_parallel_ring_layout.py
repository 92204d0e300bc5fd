"""Which blocks the ranks of a ring compute: together, each query attends to its keys exactly once."""

from itertools import accumulate
from random import Random

import pytest

from trimaran.parallel import TILE, Rectangle, RingChunks, RingLayout, ring_layout, tiles


def attended(layout: RingLayout, row: int, window: int | None) -> list[tuple[int, int]]:
    """Return the pairs of query and key positions in the sequence that this rank computes for a row."""
    ring, rank, found = layout.ring, layout.rank, []
    blocks = [(layout.own, rank, 0)]
    blocks += [(step.rectangles, (rank - step.shift) % ring.num_ranks, step.received[0]) for step in layout.steps]
    for rectangles, owner, first_key in blocks:
        for each in rectangles:
            if each.row not in (None, row):
                continue
            pairs = [(ring.position(rank, query), ring.position(owner, first_key + key))
                     for query in range(*each.queries) for key in range(*each.keys)]  # fmt: skip
            assert owner == rank or all(query > key for query, key in pairs), "only own keys need a causal mask"
            found += [(query, key) for query, key in pairs if 0 <= query - key < (window or 1 << 30)]
    return found


@pytest.mark.parametrize("seed", range(40))
def test_every_query_attends_once_to_the_keys_of_its_document(seed: int) -> None:
    chance = Random(seed)
    num_ranks, chunk, rows = chance.choice((2, 3, 4, 5)), chance.choice((1, 2, 5)), chance.choice((1, 2, 3))
    seq_len, window = 2 * num_ranks * chunk, chance.choice((None, None, 1, 3, 7))
    lengths = []
    for _ in range(rows):
        cuts = sorted(chance.sample(range(1, seq_len), chance.randrange(min(4, seq_len))))
        lengths += [end - start for start, end in zip([0, *cuts], [*cuts, seq_len], strict=True)]
    if chance.random() < 0.2:
        lengths = []
    ring = RingChunks(num_ranks, chunk)
    layouts = [ring_layout(tuple(lengths), (rows, 2 * chunk), ring, rank, window) for rank in range(num_ranks)]
    starts = [0, *accumulate(lengths)] if lengths else [row * seq_len for row in range(rows + 1)]
    for row in range(rows):
        documents = [max(start for start in starts if start <= row * seq_len + each) for each in range(seq_len)]
        expected = [(query, key) for query in range(seq_len) for key in range(query + 1)
                    if documents[query] == documents[key] and query - key < (window or seq_len)]  # fmt: skip
        assert sorted(pair for each in layouts for pair in attended(each, row, window)) == expected


def test_ranks_agree_on_what_is_sent() -> None:
    ring = RingChunks(4, 8)
    layouts = [ring_layout((20, 3, 41), (1, 16), ring, rank, None) for rank in range(4)]
    for rank, layout in enumerate(layouts):
        assert [step.shift for step in layout.steps] == [step.shift for step in layouts[0].steps]
        for number, step in enumerate(layout.steps):
            assert step.sent == layouts[(rank + step.shift) % 4].steps[number].received


def test_documents_that_no_two_ranks_share_are_not_sent() -> None:
    ring = RingChunks(4, 8)
    assert ring_layout((8,) * 8, (1, 16), ring, 1, None).steps == ()
    # Chunks 2 and 3 are those of ranks 2 and 3, chunks 6 and 7 those of ranks 1 and 0.
    steps = ring_layout((8, 8, 16, 8, 8, 16), (1, 16), ring, 3, None).steps
    assert [(step.shift, step.received) for step in steps] == [(1, (0, 8)), (3, (0, 0))]
    assert [step.rectangles for step in steps] == [(Rectangle(None, (0, 8), (0, 8)),), ()]


def test_without_documents_all_ranks_compute_equally_much() -> None:
    layouts = [ring_layout((), (1, 16), RingChunks(4, 8), rank, None) for rank in range(4)]
    sizes = [[(each.queries[1] - each.queries[0]) * (each.keys[1] - each.keys[0]) for step in layout.steps
              for each in step.rectangles] for layout in layouts]  # fmt: skip
    assert sizes == [[128] * 3] * 4


def test_tiles_outside_a_window_are_skipped() -> None:
    ring, whole = RingChunks(2, 4 * TILE), Rectangle(None, (0, 4 * TILE), (0, 4 * TILE))
    found = [*tiles(whole, ring, (0, 0), 0, TILE)]
    assert len(found) == 4 + 3
    assert all(is_masked for _, is_masked in found)
    assert len([*tiles(whole, ring, (0, 0), 0, None)]) == 10
