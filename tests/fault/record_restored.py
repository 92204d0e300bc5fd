"""Writes down the state that a rank has restored at its start, beside what `tests.chaos.plugin` does.

`restored-ATTEMPT-RANK` in the run directory has the step, what the rank would save now, and the progress.
"""

import os
import pickle
from typing import Any

from tests.chaos import plugin  # noqa: F401 - the pause of every step
from tests.fault.plugin import RUN
from tests.resume import share_of
from trimaran.train import Checkpointer

resume = Checkpointer.resume


def resume_and_record(self: Checkpointer, **options: Any) -> int:
    step = resume(self, **options)
    path = RUN / f"restored-{os.environ['TRIMARAN_ATTEMPT']}-{os.environ['RANK']}"
    path.write_bytes(pickle.dumps((step, share_of(self.state), self.state.progress())))
    return step


Checkpointer.resume = resume_and_record  # type: ignore[method-assign]
