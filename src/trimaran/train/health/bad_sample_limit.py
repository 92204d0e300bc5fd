"""Counts samples that could not be used, and ends the run when there are too many."""

from collections.abc import Mapping

from trimaran.core import UserError
from trimaran.run import RunDirectory

MIN_SAMPLES = 1000  # the fraction of bad samples is taken of at least this many


class BadSampleCount:
    """How many samples were seen and how many of them were bad. Counts all ranks' samples, so all ranks agree."""

    def __init__(self, max_bad: float = 0.0) -> None:
        self._max_bad = max_bad
        self.bad = self.seen = 0

    def state(self) -> dict[str, int]:
        """Return the counts for the checkpoint, so that a resumed run continues them."""
        return {"bad": self.bad, "seen": self.seen}

    def restore(self, state: Mapping[str, int]) -> None:
        self.bad, self.seen = int(state["bad"]), int(state["seen"])

    def too_many(self, rows: Mapping[str, float]) -> bool:
        """Add one step's loader counts, `rows`, summed over ranks; return whether too many samples are bad now."""
        self.bad += round(rows.get("bad", 0))
        self.seen += round(rows.get("samples", 0))
        return self.bad > self._max_bad * max(MIN_SAMPLES, self.seen)


def too_many_bad_samples(bad_samples: BadSampleCount, run: RunDirectory, step: int) -> UserError:
    """Return the error that ends a run with too many bad samples."""
    return UserError("T055", f"{bad_samples.bad:,} of {bad_samples.seen:,} samples could not be used up to step {step}",
                     where=f"data (each is a bad_sample event in {run.path / 'events'})",
                     fix="fix the data or allow more with data.samples.max_bad, then resume from the last "
                     "checkpoint")  # fmt: skip
