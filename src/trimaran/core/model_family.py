"""The families of networks that a recipe's `model.family` names, and what all networks of each have in common."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A family of networks. It reads token ids, images with token ids, or scenes of sensors.

    `built_by` says whose code the network is. Some models of transformers read images too; their spec says so.

    Where a family `splits_sequence`, tensor-parallel ranks split the positions of a sequence and gather the inputs of a
    layer. `in_transformers` says that transformers loads an exported folder. `pipeline_tag` is the Hub's name of the
    task; empty for none.
    """

    name: str
    built_by: Literal["trimaran", "transformers", "plugin"] = "trimaran"
    reads: Literal["text", "images", "scenes"] = "text"
    splits_sequence: bool = False
    in_transformers: bool = True
    pipeline_tag: str = "text-generation"

    @property
    def is_hf(self) -> bool:
        """Whether transformers builds the network."""
        return self.built_by == "transformers"

    @property
    def is_plugin(self) -> bool:
        """Whether a plug-in builds the network."""
        return self.built_by == "plugin"

    @property
    def is_language_model(self) -> bool:
        """Whether the network reads text alone, and its code is known: not a plug-in's."""
        return self.reads == "text" and not self.is_plugin


MODEL_FAMILIES = {
    family.name: family
    for family in (
        ModelFamily(name="decoder", splits_sequence=True),
        ModelFamily(name="vlm", reads="images", splits_sequence=True, pipeline_tag="image-text-to-text"),
        ModelFamily(name="perception", reads="scenes", in_transformers=False, pipeline_tag=""),
        ModelFamily(name="hf", built_by="transformers"),
    )
}


def family_named(name: str) -> ModelFamily:
    """Return the family of this name: one of ours, or a plug-in's."""
    return MODEL_FAMILIES.get(name) or ModelFamily(name=name, built_by="plugin", in_transformers=False)
