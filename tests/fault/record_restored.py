"""Writes down the state that a rank has restored at its start, beside what `tests.chaos.plugin` does.

`restored-ATTEMPT-RANK` in the run directory has the step, what the rank would save now, and the progress.
"""

import os
import pickle
from typing import Any

from tests.chaos import plugin
from tests.resume import share_of
from trimaran.train.checkpointing.restore import Restorer

load = Restorer._load


def load_and_record(self: Restorer, source: Any, *args: Any) -> str:
    why = load(self, source, *args)
    if not why:
        path = plugin.RUN / f"restored-{os.environ['TRIMARAN_ATTEMPT']}-{os.environ['RANK']}"
        path.write_bytes(pickle.dumps((source.step, share_of(self._state), self._state.progress())))
    return why


Restorer._load = load_and_record  # type: ignore[method-assign]
