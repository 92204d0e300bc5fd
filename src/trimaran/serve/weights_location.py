"""Where trained weights are. Imports no torch: a command names weights before it loads them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.runs import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedWeights:
    """Where weights are: a folder, or the checkpoint of a step. `run` is the run that trained them, if it is known."""

    path: Path
    run: RunDirectory | None = None
    step: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the location as JSON values, for another process of this machine."""
        run = None if self.run is None else str(self.run.path.absolute())
        return {"path": str(self.path.absolute()), "run": run, "step": self.step}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "TrainedWeights":
        run = None if values["run"] is None else RunDirectory(Path(values["run"]))
        return TrainedWeights(path=Path(values["path"]), run=run, step=values["step"])

    @property
    def label(self) -> str:
        """A short name of this set of weights: it is a part of `system_fingerprint`."""
        return self.path.name if self.step is None else f"step-{self.step}"
