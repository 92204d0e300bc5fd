"""The pins that `trimaran plan --from FILE` reads from a file of another tool, on top of the recipe, below `--set`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.app.recipe.plan_request import PlanRequest
from trimaran.core.regular_files import expand_user
from trimaran.machine import Cluster
from trimaran.planner.read.read_accelerate import read_pins
from trimaran.planner.read.read_config import ReadConfig

BATCH = "train.global_batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFile:
    """A file of accelerate or DeepSpeed, and what it says."""

    path: Path
    found: ReadConfig

    def mismatch(self, cluster: Cluster) -> str:
        """Return how the file's number of processes differs from the cluster; "" if it does not."""
        asked = self.found.num_devices
        differs = asked and asked != cluster.world_size
        return f"num_processes {asked}: the cluster {cluster} has {cluster.world_size} devices" if differs else ""

    def settings(self, cluster: Cluster) -> list[str]:
        """Return the pins as values of `--set`."""
        pins = self.found.pins_on(cluster.world_size)
        return [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in pins.items()]

    def as_dict(self, cluster: Cluster) -> dict[str, Any]:
        """Return the translation for `--json`."""
        about = {"file": str(self.path), "settings": self.settings(cluster), "mismatch": self.mismatch(cluster) or None}
        return about | self.found.as_dict()


def read_tool_file(path: Path) -> ToolFile:
    """Return what a file of accelerate or DeepSpeed says; raise UserError if it is neither."""
    path = expand_user(str(path))
    return ToolFile(path=path, found=read_pins(path))


def with_pins(
    tool_file: ToolFile,
    shortcuts: Mapping[str, object],
    settings: Sequence[str],
    read: Callable[[Mapping[str, object]], PlanRequest],
) -> PlanRequest:
    """Return the request that `read` makes of the file's pins and `shortcuts`, which win.

    The data ranks and the global batch that the file implies depend on the number of devices, which only the request
    knows.
    """
    given = {name: value for name, value in shortcuts.items() if value is not None}
    found = tool_file.found
    request = read(found.pins | given)
    num_devices = request.question.cluster.world_size
    pins = found.pins_on(num_devices)
    is_given = BATCH in given or any(each.partition("=")[0] == BATCH for each in settings)
    usual = found.usual_batch_on(num_devices, request.question.recipe.data.seq_len)
    if usual and request.file is None and not is_given and BATCH not in pins:
        pins[BATCH] = usual
    return request if pins == found.pins else read(pins | given)
