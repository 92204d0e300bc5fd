"""Samples that could not be used: counted alike on every rank, and too many of them end a run."""

from collections.abc import Mapping

from trimaran.core import UserError
from trimaran.run import RunDirectory

FEW = 1000  # samples before a share says anything


class BadSampleCount:
    """How many samples were bad so far, of how many. Every rank counts all ranks' samples, so all come to one end."""

    def __init__(self, max_bad: float = 0.0) -> None:
        self._max_bad = max_bad
        self.bad = self.seen = 0

    def state(self) -> dict[str, int]:
        """Return the counts as plain data: a run that goes on has seen what it saw before."""
        return {"bad": self.bad, "seen": self.seen}

    def restore(self, state: Mapping[str, int]) -> None:
        self.bad, self.seen = int(state["bad"]), int(state["seen"])

    def too_many(self, rows: Mapping[str, float]) -> bool:
        """Return whether there are too many now; `rows` are the sums of a step that the loaders told."""
        self.bad += round(rows.get("bad", 0))
        self.seen += round(rows.get("samples", 0))
        return self.bad > self._max_bad * max(FEW, self.seen)


def too_many_bad(tally: BadSampleCount, run: RunDirectory, step: int) -> UserError:
    """Return the report that a run with too many bad samples ends in."""
    return UserError("T055", f"{tally.bad:,} of {tally.seen:,} samples could not be used up to step {step}",
                     where=f"data (each is a bad_sample event in {run.path / 'events'})",
                     fix="mend the data or allow more, data.samples.max_bad, and resume: a checkpoint is "
                     "there")  # fmt: skip
