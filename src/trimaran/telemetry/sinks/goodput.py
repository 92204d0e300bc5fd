"""Where the time of a run went, for sinks: the same books as every view reads, kept open as long as the sink is."""

import time

from trimaran.run.run_directory import RunDirectory
from trimaran.telemetry.ledger import Books, Ledger

MIN_SECONDS, SHARE = 10.0, 0.01  # between two looks, which take at most this share of one core


class GoodputAccount:
    """Makes the books up now and then; a look reads only what the run has written since the one before."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._books = run, Books(run)
        self._next = 0.0

    def look(self) -> Ledger | None:
        """Return where the time went up to now, if it was not asked for a while; else None."""
        began = time.monotonic()
        if began < self._next:
            return None
        found = self.make_up()
        self._next = began + max(MIN_SECONDS, (time.monotonic() - began) / SHARE)
        return found

    def make_up(self) -> Ledger | None:
        """Return where the time went up to now, or to the end of a run that is over; None while there is no word."""
        try:
            # Who feeds a sink lives as long as the run's supervisor: the run is at work, or its files say otherwise.
            ledger = self._books.ledger(now=time.time())
        except (OSError, LookupError, ValueError):  # files of a run that only begins, or is torn
            self._books = Books(self._run)  # what it was about to enter is nowhere
            return None
        return ledger if ledger.total > 0 else None


def time_scalars(ledger: Ledger | None) -> dict[str, float]:
    """Return the numbers of `ledger`, each under a name as charts have them; nothing where there is none."""
    if ledger is None:
        return {}
    return {"goodput": ledger.goodput} | {f"time_seconds/{name}": each for name, each in ledger.seconds.items()}
