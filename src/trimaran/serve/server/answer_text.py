"""The text of one answer, as its tokens come: it ends before the first stop sequence."""

from collections.abc import Sequence

from trimaran.data.text.tokenizer import Tokenizer
from trimaran.serve.text_stream import MAX_BEFORE, TextStream


class AnswerText:
    """Decodes tokens as they come. Text that may be the beginning of a stop sequence waits.

    A stop sequence may begin in one token and end in another. It is not part of the text, nor is what follows it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._stream, self._stops = TextStream(tokenizer, prompt[-MAX_BEFORE:]), tuple(stops)
        self._waiting = ""
        self.num_tokens, self.is_stopped = 0, False

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that can be shown after these tokens; empty if it has to wait.

        `num_tokens` are those taken, up to the one that completes a stop sequence. With stop sequences, tokens are
        decoded one by one to find it.
        """
        if not self._stops:
            self.num_tokens += len(tokens)
            return self._stream.add(*tokens) if tokens else ""
        shown = ""
        for token in tokens:
            self.num_tokens += 1
            shown += self._next_part(self._stream.add(token), is_last=False)
            if self.is_stopped:
                break
        return shown

    def finish(self) -> str:
        """Return the text that waited. Nothing follows."""
        return "" if self.is_stopped else self._next_part(self._stream.finish(), is_last=True)

    def _next_part(self, text: str, *, is_last: bool) -> str:
        self._waiting += text
        found = [place for stop in self._stops if (place := self._waiting.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            shown, self._waiting = self._waiting[: min(found)], ""
            return shown
        keep = 0 if is_last else max((_overlap(self._waiting, stop) for stop in self._stops), default=0)
        shown, self._waiting = self._waiting[: len(self._waiting) - keep], self._waiting[len(self._waiting) - keep :]
        return shown


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `stop`."""
    return next((length for length in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:length])), 0)
