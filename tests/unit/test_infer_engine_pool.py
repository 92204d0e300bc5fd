"""The pages of the cache: none is lost, none has two owners by mistake, and old prefixes make room for new ones."""

from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.serve import BlockPool, page_digest


def test_pages_with_a_prefix_are_taken_last_and_the_least_recently_used_first() -> None:
    pool = BlockPool(3)
    pages = [pool.take() for _ in range(3)]
    digests = [page_digest(b"", [number]) for number in range(2)]
    for page, digest in zip(pages, digests, strict=False):
        pool.register(page, digest)
    for page in pages:
        pool.release([page])
    assert pool.num_free == 3
    assert pool.take() == pages[2]  # it holds nothing
    assert pool.share(digests[0]) == pages[0]  # used again: the other one is older now
    pool.release([pages[0]])
    assert pool.take() == pages[1]
    assert pool.share(digests[1]) is None
    assert pool.share(digests[0]) == pages[0]
    assert pool.num_free == 0


def test_the_end_of_a_sequence_is_given_up_before_its_beginning() -> None:
    pool = BlockPool(2)
    pages = [pool.take(), pool.take()]
    first = page_digest(b"", [1])
    pool.register(pages[0], first)
    pool.register(pages[1], page_digest(first, [2]))
    pool.release(pages)
    assert pool.take() == pages[1]
    assert pool.share(first) == pages[0]


def test_forgotten_prefixes_are_not_shared() -> None:
    pool = BlockPool(2)
    kept, used = pool.take(), pool.take()
    for number, page in enumerate((kept, used)):
        pool.register(page, page_digest(b"", [number]))
    pool.release([kept])
    pool.forget_prefixes()
    assert pool.share(page_digest(b"", [0])) is None
    assert pool.share(page_digest(b"", [1])) is None
    pool.release([used])
    assert sorted([pool.take(), pool.take()]) == [0, 1]


def test_a_digest_depends_on_everything_before() -> None:
    digests = {
        page_digest(b"", [1, 2]),
        page_digest(b"", [2, 1]),
        page_digest(b"x", [1, 2]),
        page_digest(b"", [1, 2], b"image"),
        page_digest(page_digest(b"", [1, 2]), [1, 2]),
    }
    assert len(digests) == 5
    assert page_digest(b"x", (1, 2)) == page_digest(b"x", [1, 2])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from("tsdf"), st.integers(0, 5)), max_size=60))
def test_every_page_is_free_or_has_as_many_users_as_took_it(num_pages: int, actions: list[tuple[str, int]]) -> None:
    pool, users = BlockPool(num_pages), list[int]()
    for action, number in actions:
        digest = page_digest(b"", [number])
        if action == "t" and pool.num_free:
            page = pool.take()
            assert page not in users
            users.append(page)
            pool.register(page, digest)
        elif action == "s" and (page := pool.share(digest)) is not None:
            users.append(page)
        elif action == "d" and users:
            pool.release([users.pop(number % len(users))])
        elif action == "f":
            pool.forget_prefixes()
        assert pool.num_used == len(set(users))
    pool.release(users)
    assert pool.num_free == num_pages
    assert sorted(pool.take() for _ in range(num_pages)) == list(range(num_pages))
