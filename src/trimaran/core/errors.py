"""The error for a user's mistake, and the exit codes. Any other exception is a fault."""

import difflib
from collections.abc import Iterable
from typing import Any

EXIT_DONE = 0
EXIT_USER = 2
EXIT_AGAIN = 75  # stopped early with a complete checkpoint: start it again
EXIT_STUCK = 93  # no progress: do not start it again


class UserError(Exception):
    """A user's mistake: what is wrong, where, and how to fix it. Shown without a traceback; the exit code is 2.

    Every `code` has a page under `docs/codes/`.
    """

    def __init__(self, code: str, what: str, *, where: str, fix: str) -> None:
        super().__init__(code, what, where, fix)
        self.code, self.what, self.where, self.fix = code, what, where, fix

    def __str__(self) -> str:
        return f"{self.code}: {self.what}\n  where: {self.where}\n  fix:   {self.fix}"

    def as_dict(self) -> dict[str, Any]:
        return {"code": self.code, "what": self.what, "where": self.where, "fix": self.fix}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'steps'?)` if one of `known` is close to `word`, else an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""
