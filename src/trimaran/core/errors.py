"""The error for a user's mistake, the exit codes, and the warning about an old name. Any other exception is a fault."""

import difflib
import errno
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from trimaran.core.template_text import templated

EXIT_DONE = 0
EXIT_USER = 2
EXIT_AGAIN = 75  # stopped early with a complete checkpoint: start it again
EXIT_STUCK = 93  # no progress: do not start it again

MESSAGES = Path(__file__).with_name("messages")
MAX_CHARACTERS = 1000  # of each line of an error; it may quote a value of any length
FILE_FIXES = {  # what to do about an error of the operating system that no command expects
    errno.EACCES: "check its owner and permissions with ls -l",
    errno.EPERM: "check its owner and permissions with ls -l",
    errno.EROFS: "name a folder on a disk that is not read-only",
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free disk space: your quota is used up",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ENOTDIR: "name a path whose folders are folders",
    errno.EISDIR: "name a file, not a folder",
    errno.ELOOP: "name a path without a loop of links",
    errno.EMFILE: "raise the limit of open files: ulimit -n 65536",
    errno.ENFILE: "close other programs: the machine has no file handle left",
    errno.EIO: "check the disk, or name a file that can be read",
    errno.ESTALE: "check the network file system, then try again",
}


class ErrorTexts(NamedTuple):
    """The texts of a mistake in English and in Chinese, with places for its values."""

    what: str
    fix: str = ""
    zh_what: str = ""
    zh_fix: str = ""


class UserError(Exception):
    """A user's mistake: what is wrong, where, and how to fix it. Shown without a traceback; the exit code is 2.

    `code` names a message of `core/messages`, such as `K024.path-already-exists`, and `values` are those of its places.
    An error of another process or of a plug-in has its own `what` and `fix`. Every code has a page under `docs/codes/`.
    `others` are further mistakes that were found together with this one.
    """

    def __init__(
        self, code: str, what: str | None = None, *, where: str, fix: str | None = None, **values: object
    ) -> None:
        super().__init__(code, what, where, fix)
        self.code, _, self._name = code.partition(".") if what is None else (code, "", "")
        self._what, self._fix, self._values = what, fix, values
        self.where = _shortened(where)
        self.others: tuple[UserError, ...] = ()

    def __str__(self) -> str:
        lines = [f"{each.code}: {each.what}\n  where: {each.where}\n  fix:   {each.fix}" for each in self.all]
        return "\n".join(lines)

    @property
    def what(self) -> str:
        """What is wrong, in English. A `TemplateText` has its template and values, for another language."""
        return _shortened(templated(self._texts.what, **self._values) if self._what is None else self._what)

    @property
    def fix(self) -> str:
        """How to correct it, in English."""
        return _shortened(templated(self._texts.fix, **self._values) if self._fix is None else self._fix)

    @property
    def _texts(self) -> ErrorTexts:
        return messages(self.code[0])[self.code][self._name]

    @property
    def all(self) -> "tuple[UserError, ...]":
        """This mistake and the others, in the order in which they are shown."""
        return (self, *self.others)

    def as_dict(self) -> dict[str, Any]:
        """Return the mistake for `--json`; `others` is there only if several mistakes were found."""
        found: dict[str, Any] = {"code": self.code, "what": self.what, "where": self.where, "fix": self.fix}
        return found | ({"others": [each.as_dict() for each in self.others]} if self.others else {})


def raise_together(mistakes: Sequence[UserError]) -> None:
    """Raise the first of the mistakes, with the rest as its `others`; return if there is none."""
    # Each once.
    found = {(each.code, each.what, each.where, each.fix): each for mistake in mistakes for each in mistake.all}
    if mistakes:
        mistakes[0].others = tuple(found.values())[1:]
        raise mistakes[0]


@contextmanager
def collected(mistakes: list[UserError]) -> Iterator[None]:
    """Append a UserError of the block to `mistakes`, for `raise_together`, instead of raising it."""
    try:
        yield
    except UserError as error:
        mistakes.append(error)


def file_error(error: OSError) -> UserError | None:
    """Return the UserError for an error of a disk or of permissions; None for any other, which may be our own fault."""
    if error.errno not in FILE_FIXES:
        return None
    return UserError(
        "A024.file-folder",
        where=str(error.filename or "a file that was being read or written"),
        fix=FILE_FIXES[error.errno],
        reason=error.strerror,
    )


@cache
def messages(letter: str) -> Mapping[str, Mapping[str, ErrorTexts]]:
    """Return the messages of all codes that start with this letter, by code and name."""
    import yaml  # noqa: PLC0415  most commands make no mistake

    text = (MESSAGES / f"{letter}.yaml").read_text(encoding="utf-8")
    found = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {code: {name: ErrorTexts(**texts) for name, texts in named.items()} for code, named in found.items()}


def _shortened(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[: MAX_CHARACTERS - 100]} ... {text[-40:]} ({len(text):,} characters)"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'steps'?)` if one of `known` is close to `word`, else an empty string."""
    near = closest(word, known)
    return templated(" (did you mean '{near}'?)", near=near) if near else ""


def closest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the one of `known` that is spelt nearly like `word`; empty if none is. `cutoff` 1: only an equal word."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), "")


GONE_IN = "0.3"
# The old name, the new one. docs/guides/upgrade.md lists them for users; docs/decisions/0082 says how to add one.
RENAMED = {"trimaran.Boat": "trimaran.Loop", "trimaran.run": "trimaran.runs", "Loop.rounds": "Loop.uneven_batches"}


def warn_of_old_name(old: str) -> None:
    """Warn the caller's caller that `old` has a new name. Every place that still knows an old name calls this."""
    message = f"{old} is now {RENAMED[old]}; the old name goes away in Trimaran {GONE_IN}"
    warnings.warn(message, FutureWarning, stacklevel=3)
