"""Token ids to text, as they come: a character appears when all its bytes are there."""

from collections.abc import Iterable, Sequence

from trimaran.data import Tokenizer

UNDECODABLE = "\ufffd"
MAX_BEFORE = 8  # tokens of the prompt that the first part is decoded with
MAX_WAITING = 64  # tokens that wait for the rest of a character: one has four bytes, but a token may have no text
MAX_TOGETHER = 32  # tokens that are decoded at once


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
        """Return the text that these tokens complete; the rest waits. It is the same as if they came one by one."""
        starts = range(0, len(tokens), MAX_TOGETHER)
        return "".join(self._add_few(tokens[start : start + MAX_TOGETHER]) for start in starts)

    def finish(self) -> str:
        return self._shown_part(self._decoded())

    def _add_few(self, tokens: Sequence[int]) -> str:
        self._ids += tokens
        num_waiting, text = len(self._ids) - self._shown, self._decoded()
        if num_waiting <= MAX_WAITING and not text.endswith(UNDECODABLE):
            return self._shown_part(text)
        if len(tokens) == 1:
            return self._shown_part(text) if num_waiting > MAX_WAITING else ""
        del self._ids[-len(tokens) :]
        return "".join(self._add_few([each]) for each in tokens)

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._ids[self._start :])

    def _shown_part(self, text: str) -> str:
        """Return what `text` has after what was shown. All of it is shown now."""
        part = text[len(self._tokenizer.decode(self._ids[self._start : self._shown])) :]
        self._start, self._shown = self._shown, len(self._ids)
        self.num_undecodable += part.count(UNDECODABLE)
        return part.replace(UNDECODABLE, "")
