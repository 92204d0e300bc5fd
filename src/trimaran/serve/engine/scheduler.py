"""Which tokens of which sequences the next step computes, and in which pages their keys and values are."""

from array import array
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Sequence
from hashlib import blake2b
from itertools import count
from operator import attrgetter
from typing import NamedTuple

from trimaran.serve.engine.engine_request import EngineRequest
from trimaran.serve.settings import EngineSettings

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
            del self._by_digest[self._digests.pop(page)]
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


class EngineSequence:
    """The growing sequence of one request.

    `order` is its place in the order of arrival; `number` is another one each time that it gets pages after it had
    none. The keys and values of the first `num_computed` tokens are in `pages`. `in_flight` has, for each token after
    `tokens` that only the device knows yet, the number of the sequence in the step that chooses it.
    """

    __slots__ = (
        "_salt",
        "digests",
        "in_flight",
        "num_computed",
        "num_prompt",
        "number",
        "order",
        "pages",
        "request",
        "tokens",
    )  # fmt: skip

    def __init__(self, request: EngineRequest, order: int) -> None:
        self.request, self.order, self.number = request, order, -1
        self.tokens = [*request.prompt, *request.generated]
        self.num_prompt, self.num_computed = len(request.prompt), 0
        self.in_flight: deque[int] = deque()
        self.pages: list[int] = []
        self.digests: list[bytes] = []
        self._salt = (request.adapter or "").encode()

    @property
    def length(self) -> int:
        """How many tokens it has, with those in flight."""
        return len(self.tokens) + len(self.in_flight)

    @property
    def num_left(self) -> int:
        """How many tokens are not computed yet; 1 while it generates."""
        return self.length - self.num_computed

    def whole_images(self, stop: int) -> int:
        """Return the last index up to `stop` that is inside no image."""
        for image in self.request.images:
            if image.first < stop < image.stop:
                return image.first
        return stop

    def digest(self, page: int, page_size: int) -> bytes:
        """Return the digest of a full page; those of all pages before it are computed first."""
        while len(self.digests) <= page:
            start = len(self.digests) * page_size
            before = self.digests[-1] if self.digests else self._salt
            images = []
            for image in self.request.images:
                if start <= image.first < start + page_size:
                    digest = blake2b(image.patches.tobytes(), digest_size=16)
                    digest.update(image.grids.tobytes())
                    images.append(digest.digest())
            self.digests.append(page_digest(before, self.tokens[start : start + page_size], b"".join(images)))
        return self.digests[page]


class ScheduledPart(NamedTuple):
    """The next `num_tokens` tokens of a sequence, computed in one step."""

    sequence: EngineSequence
    num_tokens: int


class Scheduler:
    """Gives each step to sequences that generate first, then to prompts, in the order of arrival.

    A prompt longer than what is left of a step is computed in parts. Pages are taken when they are needed. If there is
    none, the youngest sequence gives its pages back and is computed again later, with the tokens that it has generated.
    The oldest one is never preempted, so every request ends.
    """

    def __init__(self, pool: BlockPool, page_size: int, settings: EngineSettings) -> None:
        self.pool, self.page_size, self.settings = pool, page_size, settings
        self.running: list[EngineSequence] = []  # in the order of arrival, as the waiting ones
        self.waiting: deque[EngineSequence] = deque()
        self.num_preemptions = self.num_reused_tokens = 0
        self._numbers = count()
        self._ended: list[int] = []

    def add(self, sequence: EngineSequence) -> None:
        self.waiting.append(sequence)

    def take_ended(self) -> list[int]:
        """Return the numbers of the sequences that have lost their pages since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def plan(self) -> list[ScheduledPart]:
        """Return what the next step computes: sequences with one new token first. Call `commit` when it has."""
        budget = self.settings.max_step_tokens
        parts, planned = self._plan_decodes()
        budget -= len(parts)
        prompts, is_blocked = self._plan_prompts(budget, planned)
        budget -= sum(each.num_tokens for each in prompts)
        if not is_blocked:
            prompts += self._admit(budget)
        if not prompts:
            return parts
        return [*parts, *sorted(prompts, key=lambda part: part.num_tokens != 1)]

    def commit(self, parts: list[ScheduledPart]) -> None:
        """Take note that the tokens of `plan` are computed, or will be before those of the next plan."""
        size, shares = self.page_size, self.settings.reuse_prefixes
        for sequence, num_tokens in parts:
            before = sequence.num_computed
            sequence.num_computed = before + num_tokens
            if shares and before // size != sequence.num_computed // size:
                for page in range(before // size, min(sequence.num_computed, len(sequence.tokens)) // size):
                    self.pool.register(sequence.pages[page], sequence.digest(page, size))

    def put(self, sequence: EngineSequence, token: int) -> None:
        """Append the next token, which may have been in flight: its page may now be shared."""
        index = len(sequence.tokens)
        sequence.tokens.append(token)
        if sequence.in_flight:
            sequence.in_flight.popleft()
        is_full = (index + 1) % self.page_size == 0 and index < sequence.num_computed
        if is_full and self.settings.reuse_prefixes:
            page = index // self.page_size
            self.pool.register(sequence.pages[page], sequence.digest(page, self.page_size))

    def remove(self, sequence: EngineSequence) -> None:
        """Forget a sequence that has ended, and give its pages back now."""
        if sequence.number < 0:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._release(sequence)

    def forget_prefixes(self) -> None:
        """Share none of the pages that exist now; running sequences are computed again."""
        for sequence in list(reversed(self.running)):
            self._preempt(sequence)
        self.pool.forget_prefixes()

    def _plan_decodes(self) -> tuple[list[ScheduledPart], set[int]]:
        """Return the next token of each sequence that generates, and the numbers of these sequences."""
        parts, planned = [], set()
        for sequence in list(self.running):
            if sequence.number < 0 or sequence.num_left != 1:
                continue  # preempted just now, or it still has a prompt
            has_room = sequence.num_computed < len(sequence.pages) * self.page_size
            while not has_room and not self._grow(sequence, sequence.num_computed + 1):
                victim = self._youngest(planned)
                self._preempt(victim)
                if victim is sequence:
                    break
            if sequence.number >= 0:
                parts.append(ScheduledPart(sequence, 1))
                planned.add(sequence.number)
        return parts, planned

    def _plan_prompts(self, budget: int, planned: set[int]) -> tuple[list[ScheduledPart], bool]:
        """Return the next parts of prompts that are begun, and whether one of them has to wait for pages."""
        parts: list[ScheduledPart] = []
        planned = set(planned)
        for sequence in list(self.running):
            if sequence.number < 0 or sequence.number in planned or budget < 1:
                continue
            start = sequence.num_computed
            wanted = sequence.whole_images(min(start + budget, sequence.length))
            if wanted == start:
                continue  # the next image is larger than what is left of this step
            while True:  # as far as the free pages go
                most = (len(sequence.pages) + self.pool.num_free) * self.page_size
                stop = wanted if most >= wanted else max(start, sequence.whole_images(most))
                if stop != start:
                    break
                victim = self._youngest(planned)
                if victim is sequence:
                    return parts, True
                self._preempt(victim)
            assert self._grow(sequence, stop), "the pages were counted"
            parts.append(ScheduledPart(sequence, stop - start))
            planned.add(sequence.number)
            budget -= stop - start
        return parts, False

    def _admit(self, budget: int) -> list[ScheduledPart]:
        """Return the first parts of waiting sequences, if there are pages for the whole of them."""
        parts: list[ScheduledPart] = []
        while self.waiting and budget > 0 and len(self.running) < self.settings.max_running:
            if self.running and self.pool.num_free <= len(self.running):
                break  # it would be refused below; a long prefix need not be looked up for that in every step
            sequence = self.waiting[0]
            if sequence.in_flight:
                break  # preempted just now
            self._share_prefix(sequence)
            needed = -(-sequence.length // self.page_size) - len(sequence.pages)
            stop = sequence.whole_images(min(sequence.num_computed + budget, sequence.length))
            # One page for each of the others, so that the new one is not preempted at once.
            is_short = bool(self.running) and needed + len(self.running) > self.pool.num_free
            if is_short or stop == sequence.num_computed:
                self.pool.release(sequence.pages)
                sequence.pages, sequence.num_computed = [], 0
                break
            assert self._grow(sequence, stop), "the pages were counted"
            self.waiting.popleft()
            sequence.number = next(self._numbers)
            self.num_reused_tokens += sequence.num_computed
            insort(self.running, sequence, key=attrgetter("order"))
            parts.append(ScheduledPart(sequence, stop - sequence.num_computed))
            budget -= stop - sequence.num_computed
        return parts

    def _share_prefix(self, sequence: EngineSequence) -> None:
        """Begin a sequence with the pages of others that have the same prefix; at least one token stays to compute."""
        request = sequence.request  # these need more of their prompt than keys and values
        if not self.settings.reuse_prefixes or request.embed or request.prompt_logprobs:
            return
        for page in range((len(sequence.tokens) - 1) // self.page_size):
            shared = self.pool.share(sequence.digest(page, self.page_size))
            if shared is None:
                break
            sequence.pages.append(shared)
        whole = len(sequence.pages) * self.page_size
        while (at := sequence.whole_images(whole)) != whole:  # no image is computed in part
            whole = at // self.page_size * self.page_size
        kept = whole // self.page_size
        self.pool.release(sequence.pages[kept:])
        del sequence.pages[kept:]
        sequence.num_computed = whole

    def _grow(self, sequence: EngineSequence, length: int) -> bool:
        """Take pages for `length` tokens; return False, and take none, if there are not enough."""
        needed = -(-length // self.page_size) - len(sequence.pages)
        if needed > self.pool.num_free:
            return False
        sequence.pages += [self.pool.take() for _ in range(needed)]
        return True

    def _youngest(self, planned: set[int]) -> EngineSequence:
        """Return the last sequence in the order of arrival that is not planned for this step."""
        return next(each for each in reversed(self.running) if each.number not in planned)

    def _preempt(self, sequence: EngineSequence) -> None:
        """Take the pages of a running sequence; it waits before all that came later."""
        self.running.remove(sequence)
        self._release(sequence)
        self.num_preemptions += 1
        insort(self.waiting, sequence, key=attrgetter("order"))

    def _release(self, sequence: EngineSequence) -> None:
        self._ended.append(sequence.number)
        self.pool.release(sequence.pages)
        sequence.pages, sequence.num_computed, sequence.number = [], 0, -1
