"""The goodput ledger for sinks: polled now and then, with the same reader that every view uses."""

import time

from trimaran.runs.read.ledger import Ledger, LedgerReader
from trimaran.runs.run_directory import RunDirectory

MIN_POLL_SECONDS = 10.0
MAX_CPU_FRACTION = 0.01  # of one core that polling may use


class LedgerPoller:
    """Polls the ledger now and then. Each poll reads only new lines."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._reader = run, LedgerReader(run)
        self._next = 0.0

    def poll(self) -> Ledger | None:
        """Return the ledger up to now; None if the last poll was too recent."""
        began = time.monotonic()
        if began < self._next:
            return None
        ledger = self.read()
        self._next = began + max(MIN_POLL_SECONDS, (time.monotonic() - began) / MAX_CPU_FRACTION)
        return ledger

    def read(self) -> Ledger | None:
        """Return the ledger up to now, or to the end of a finished run; None if there is nothing yet."""
        try:
            # The sidecar lives as long as the supervisor, so the run is live unless its files say otherwise.
            ledger = self._reader.read(now=time.time())
        except (OSError, LookupError, ValueError):  # the run is just starting, or a file is damaged
            self._reader = LedgerReader(self._run)  # lines may have been half counted
            return None
        return ledger if ledger.total > 0 else None


def time_scalars(ledger: Ledger | None) -> dict[str, float]:
    """Return the ledger as named scalars for charts; empty for None."""
    if ledger is None:
        return {}
    return {"goodput": ledger.goodput} | {f"time_seconds/{name}": each for name, each in ledger.seconds.items()}
