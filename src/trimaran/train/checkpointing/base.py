"""The frozen weights that an adapter is trained on. Checkpoints do not hold them: they hold a digest of them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimaran.core import ModelSection
from trimaran.models import model_folder
from trimaran.nets import Network
from trimaran.nets.whole_tensors import ReadTensor
from trimaran.parallel.axes.stage_map import StageMap


class Base:
    """Nothing is frozen: a checkpoint holds all weights. The methods of this class do nothing."""

    is_apart = False

    def known(self) -> dict[str, Any]:
        """Return the fields that name the base in a copy of the state; none while it is being hashed."""
        return {}

    def name(self) -> dict[str, Any]:
        """Return these fields once the base is hashed. Raises UserError if a file has changed since the start."""
        return {}

    def is_named_in(self, progress: Mapping[str, Any]) -> bool:
        """Return whether a saved state names its base. Every rank must call it; rank 0 decides for all."""
        return True

    def refuse_other(self, progress: Mapping[str, Any], report_progress: Callable[[], None]) -> None:
        """Raise UserError if a saved state names another base. Every rank must call it; rank 0 decides for all."""

    def reload(self) -> None:
        """Read the base again, in place."""

    def save_model(
        self,
        networks: Sequence[Network],
        folder: Path,
        section: ModelSection,
        *,
        rank: int,
        stages: StageMap,
        read: ReadTensor,
        add_files: Callable[[Path], None],
        report_progress: Callable[[], None],
    ) -> None:
        """Write what was trained to `folder`, see `save_network`. Every rank must call it."""
        from trimaran.checkpoint.export_hf import save_network  # noqa: PLC0415  nothing needs it before the end

        save_network(
            networks,
            folder,
            rank=rank,
            stages=stages,
            origin=model_folder(section.path) if section.path else None,
            add_files=add_files,
            read=read,
            report_progress=report_progress,
        )

    def of_networks(self, reload: Callable[[], None]) -> "Base":
        """Return the same base for other networks, which `reload` reads it into."""
        return self
