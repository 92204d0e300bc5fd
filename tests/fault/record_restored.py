"""Writes down the state that a rank has restored at its start, beside what `tests.chaos.plugin` does.

`restored-ATTEMPT-RANK` in the run directory has the step, what the rank would save now, and the progress.
"""

import os
import pickle

from tests.chaos import plugin  # noqa: F401 - the pause of every step
from tests.fault.plugin import RUN
from tests.resume import share_of
from trimaran.train import Checkpointer, CheckpointInputs

resume = Checkpointer.resume


def resume_and_record(inputs: CheckpointInputs) -> Checkpointer:
    checkpointer = resume(inputs)
    path = RUN / f"restored-{os.environ['TRIMARAN_ATTEMPT']}-{os.environ['RANK']}"
    path.write_bytes(pickle.dumps((checkpointer.start, share_of(inputs.state), inputs.state.progress())))
    return checkpointer


Checkpointer.resume = resume_and_record  # type: ignore[method-assign]
