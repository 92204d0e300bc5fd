"""Token ids to text, as they come: a character appears when all its bytes are there."""

from collections.abc import Iterable

from trimaran.data.tokenizer import Tokenizer

UNDECODABLE = "\ufffd"
MAX_BEFORE = 8  # tokens of the prompt that the first part is decoded with
MAX_WAITING = 64  # tokens that wait for the rest of a character: one has four bytes, but a token may have no text


class TextStream:
    """Decodes ids one by one. The parts, joined, are the decoded text without bytes that are not UTF-8.

    A token may hold a part of a character, and the space before a word may depend on the token before it. So each part
    is the difference of two decoded texts that start a few tokens earlier; one that ends inside a character waits, but
    not for more than `MAX_WAITING` tokens: each of them would decode all that wait again.
    """

    def __init__(self, tokenizer: Tokenizer, before: Iterable[int] = ()) -> None:
        """`before` are ids that were shown already, such as those of the prompt."""
        self._tokenizer = tokenizer
        self._ids = list(before)
        self._start, self._shown = max(0, len(self._ids) - MAX_BEFORE), len(self._ids)
        self.num_undecodable = 0

    def add(self, *tokens: int) -> str:
        """Return the text that these tokens complete; empty if they end inside a character."""
        self._ids += tokens
        return self._next_part(is_last=False)

    def finish(self) -> str:
        """Return the rest of the text. Bytes of a character that was never completed are left out."""
        return self._next_part(is_last=True)

    def _next_part(self, *, is_last: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._shown])
        after = self._tokenizer.decode(self._ids[self._start :])
        if after.endswith(UNDECODABLE) and not is_last and len(self._ids) - self._shown <= MAX_WAITING:
            return ""
        part = after[len(before) :]
        self._start, self._shown = self._shown, len(self._ids)
        self.num_undecodable += part.count(UNDECODABLE)
        return part.replace(UNDECODABLE, "")
