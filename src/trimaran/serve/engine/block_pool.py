"""Which pages of the key-value cache are in use, by how many sequences, and which hold a prefix that may come again."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16


def page_digest(before: bytes, tokens: Sequence[int], other: bytes = b"") -> bytes:
    """Return the digest of a full page: of all tokens up to its end, and of what else its keys and values depend on.

    `before` is the digest of the page before it. Two prefixes have the same digest only if they are the same: it is a
    cryptographic one, because the prompts come from strangers.
    """
    digest = blake2b(before, digest_size=DIGEST_BYTES)
    digest.update(array("q", tokens).tobytes())
    digest.update(other)
    return digest.digest()


class BlockPool:
    """The pages of a cache, by number. A page that no sequence uses, but has a known prefix, is kept until needed.

    `take` prefers pages without such a prefix, and then takes the one that was used least recently.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._users = [0] * num_pages
        self._empty = list(range(num_pages - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()  # pages without users, the least recently used first
        self._digests: dict[int, bytes] = {}
        self._by_digest: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """How many pages no sequence uses."""
        return len(self._empty) + len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def take(self) -> int:
        """Return a page for one sequence. There must be a free one."""
        if self._empty:
            page = self._empty.pop()
        else:
            page, _ = self._kept.popitem(last=False)
            self._forget(page)
        self._users[page] = 1
        return page

    def share(self, digest: bytes) -> int | None:
        """Return the page with this digest, with one more user; None if there is none."""
        page = self._by_digest.get(digest)
        if page is not None:
            if not self._users[page]:
                del self._kept[page]
            self._users[page] += 1
        return page

    def register(self, page: int, digest: bytes) -> None:
        """Let other sequences share this page, which is full. If another one has the same digest, that one stays."""
        if digest not in self._by_digest and page not in self._digests:
            self._by_digest[digest], self._digests[page] = page, digest

    def release(self, pages: Sequence[int]) -> None:
        """End one use of each of these pages of a sequence. The last ones are taken again first: prefixes branch."""
        for page in reversed(pages):
            assert self._users[page] > 0, "a page is released once for each use"
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._digests:
                self._kept[page] = None
            else:
                self._empty.append(page)

    def forget_prefixes(self) -> None:
        """Share no page that exists now, because keys and values with the same tokens will be others."""
        self._empty += self._kept
        self._kept.clear()
        self._digests.clear()
        self._by_digest.clear()

    def _forget(self, page: int) -> None:
        del self._by_digest[self._digests.pop(page)]
