"""The wish to stop early. It is reduced with the step, so that all ranks stop at the same one (law 5)."""

import signal
from pathlib import Path
from types import FrameType


class StopRequest:
    """True once this process got SIGTERM or SIGINT, or, on the rank that looks, once the stop file is there."""

    def __init__(self, file: Path | None = None) -> None:
        self._file, self._signalled = file, False

    def __bool__(self) -> bool:
        return self._signalled or (self._file is not None and self._file.exists())

    def listen(self) -> None:
        """Turn signals into a wish instead of an abrupt end. Call it from the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
