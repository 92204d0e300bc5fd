"""The texts of a page in the language of its reader. The English sentence is the key of its translation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Translate = Callable[[str], str]

_translate: ContextVar[Translate | None] = ContextVar("translate", default=None)


def say(text: str, **values: object) -> str:
    """Return `text` in the reader's language, with `values` in the places that it names: `{count} runs`."""
    translate = _translate.get()
    found = translate(text) if translate is not None else text
    return found.format(**values) if values else found


@contextmanager
def speaking(translate: Translate | None) -> Iterator[None]:
    """Make `say` use `translate` within the block; None is English."""
    token = _translate.set(translate)
    try:
        yield
    finally:
        _translate.reset(token)
