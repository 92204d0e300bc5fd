"""A request inside the engine: its tokens so far, how many of them are computed, and its pages."""

from hashlib import blake2b

from trimaran.serve.engine.block_pool import page_digest
from trimaran.serve.engine.engine_request import EngineRequest
from trimaran.train.generation.next_token import PlacedImage


class EngineSequence:
    """The growing sequence of one request.

    `order` is its place in the order of arrival; `number` is another one each time that it gets pages after it had
    none. The keys and values of the first `num_computed` tokens are in `pages`. Tokens that the device has not told yet
    are negative: -1 - s stands for the one that sequence s of the step in flight chooses.
    """

    __slots__ = ("_salt", "digests", "num_computed", "num_prompt", "number", "order", "pages", "request", "tokens")

    def __init__(self, request: EngineRequest, order: int) -> None:
        self.request, self.order, self.number = request, order, -1
        self.tokens = [*request.prompt, *request.generated]
        self.num_prompt, self.num_computed = len(request.prompt), 0
        self.pages: list[int] = []
        self.digests: list[bytes] = []
        self._salt = (request.adapter or "").encode()

    @property
    def num_left(self) -> int:
        """How many tokens are not computed yet; 1 while it generates."""
        return len(self.tokens) - self.num_computed

    @property
    def num_known(self) -> int:
        """How many tokens the host knows; the last ones may still be in flight."""
        known = len(self.tokens)
        while known > self.num_prompt and self.tokens[known - 1] < 0:
            known -= 1
        return known

    def put(self, index: int, token: int) -> None:
        """Write the token at an index: the next one, or one that was in flight."""
        if index == len(self.tokens):
            self.tokens.append(token)
        else:
            self.tokens[index] = token

    @property
    def may_reuse(self) -> bool:
        """Whether it needs nothing of its prompt but keys and values."""
        return not self.request.embed and not self.request.prompt_logprobs

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
            images = b"".join(
                image_digest(each) for each in self.request.images if start <= each.first < start + page_size
            )
            self.digests.append(page_digest(before, self.tokens[start : start + page_size], images))
        return self.digests[page]


def image_digest(image: PlacedImage) -> bytes:
    """Return the digest of an image's pixels and shape."""
    digest = blake2b(image.patches.tobytes(), digest_size=16)
    digest.update(image.grids.tobytes())
    return digest.digest()
