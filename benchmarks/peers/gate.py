"""The channel between a peer's process and the one that decides whose turn it is.

A peer reports with one line of JSON and waits for one line, the word that allows what comes next. Everything that
libraries print goes to standard error.
"""

import json
import os
import sys
from typing import Any


class Gate:
    """A peer's end of the channel: standard input, and what was standard output when it was built."""

    def __init__(self) -> None:
        self._reports = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def report(self, state: str, **fields: Any) -> None:
        print(json.dumps({"state": state} | fields), file=self._reports, flush=True)

    def wait(self, state: str, **fields: Any) -> None:
        """Report, and return when the next thing is allowed. If the other side is gone, end the process."""
        self.report(state, **fields)
        if not sys.stdin.readline():
            os._exit(1)
