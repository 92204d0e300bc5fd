"""The settings of an engine, passed to its processes as JSON on the command line."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trimaran.serve.weights_location import TrainedWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """How much an engine does at once. `cache_bytes` None: what the device has left, within reason."""

    max_running: int = 64
    max_step_tokens: int = 1024
    page_size: int = 16
    cache_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Which weights an engine loads, and over how many ranks. `adapters` are PEFT folders by name.

    `cache` is the folder of digests of base models.
    """

    weights: TrainedWeights
    dtype: str = "auto"
    tp: int = 1
    pp: int = 1
    quantise: Literal["fp8", "int8", "int4"] | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    sizes: EngineSizes = EngineSizes()
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
        weights, sizes = TrainedWeights.from_dict(values.pop("weights")), EngineSizes(**values.pop("sizes"))
        return EngineConfig(weights=weights, sizes=sizes, **values)
