"""How an engine and a server behave, and which weights they serve. Imports no torch: a command fills it in first."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from trimaran.core import Recipe, UserError
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
    def recipe(self) -> Recipe | None:
        return self.run.read_recipe() if self.run else None

    @property
    def label(self) -> str:
        """A short name of this set of weights: it is a part of `system_fingerprint`."""
        return self.path.name if self.step is None else f"step-{self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How much an engine does at once."""

    max_running: int = 64  # sequences of a step, at most
    max_step_tokens: int = 1024  # tokens of a step, at most
    page_size: int = 16
    cache_bytes: int | None = None  # None: what the device has left, within reason
    reuse_prefixes: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.max_running < self.max_step_tokens:
            raise UserError(
                "E001.sequences-not-fit",
                where="max_running, max_step_tokens",
                max_running=self.max_running,
                max_step_tokens=self.max_step_tokens,
            )

    @property
    def max_image_tokens(self) -> int:
        """The tokens of the largest image: it is never split, and fits in a step beside one token of each sequence."""
        return self.max_step_tokens - self.max_running


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Which weights an engine loads, over how many ranks; PEFT folders by name; `cache` for digests of base models."""

    weights: TrainedWeights
    dtype: str = "auto"
    tp: int = 1
    pp: int = 1
    quantise: Literal["fp8", "int8", "int4"] | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    sizes: EngineSettings = EngineSettings()
    cache: str | None = None

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    def as_dict(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in ("dtype", "tp", "pp", "quantise", "cache")}
        adapters = dict(self.adapters)
        return plain | {"weights": self.weights.as_dict(), "adapters": adapters, "sizes": asdict(self.sizes)}

    @staticmethod
    def parse(text: str) -> "EngineConfig":
        values = json.loads(text)
        weights, sizes = TrainedWeights.from_dict(values.pop("weights")), EngineSettings(**values.pop("sizes"))
        return EngineConfig(weights=weights, sizes=sizes, **values)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How a dead engine is started again: after a pause that doubles, and at most so many times without success."""

    first_pause: float = 0.2
    longest_pause: float = 30.0
    max_failures: int = 5
    stall_seconds: float = 600.0  # an engine with work that sends no message for this long is killed
    stop_seconds: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How a server behaves. `follow_after` is the step whose successors are loaded; None: the weights stay."""

    name: str
    token: str
    host: str = "127.0.0.1"
    max_queue: int = 1024
    max_body_bytes: int = 32 << 20
    max_client_connections: int = 1024
    drain_seconds: float = 30.0
    follow_after: int | None = None
    follow_seconds: float = 1.0
    policy: RestartPolicy = RestartPolicy()
