"""The spec of any of our networks: what all of them answer, and the outline and config.json of each kind.

Every spec has `language`, `vision`, `tower_names`, `num_blocks`, `images`, `scenes`, `initial_rules` and
`tensor_sizes`. The functions here also take None, the spec of a network that only its code knows.
"""

from typing import Any

from trimaran.core import ScenePoints
from trimaran.models.outline import Outline, outline_of
from trimaran.models.perception_spec import PerceptionSpec, perception_config, perception_outline
from trimaran.models.spec import ModelSpec
from trimaran.models.vlm_spec import ImageLimits, VisionSpec, VlmSpec, vlm_outline

Spec = ModelSpec | VlmSpec | PerceptionSpec


def language_of(spec: Spec | None) -> ModelSpec | None:
    """Return the decoder that the model is or contains; None if it has none."""
    return None if spec is None else spec.language


def vision_of(spec: Spec | None) -> VisionSpec | None:
    """Return the vision tower of a vision-language model; None for others."""
    return None if spec is None else spec.vision


def decoder_of(spec: Spec | None) -> ModelSpec | None:
    """Return the spec of a model that is a decoder and nothing else; None for others."""
    language = language_of(spec)
    return language if language is spec else None


def spec_outline(spec: Spec, images: ImageLimits, points: ScenePoints | None = None) -> Outline:
    """Return the outline of our network of this shape, for samples with these images, or scenes with these points."""
    match spec:
        case ModelSpec():
            return outline_of(spec)
        case VlmSpec():
            return vlm_outline(spec, images)
        case PerceptionSpec():
            return perception_outline(spec, points)


def disk_config(spec: Spec) -> dict[str, Any]:
    """Return the config.json of a network of this shape. Raises UserError if no format can express it."""
    match spec:
        case ModelSpec():
            from trimaran.models.from_hf import spec_to_hf  # noqa: PLC0415

            return spec_to_hf(spec)
        case VlmSpec():
            from trimaran.models.vlm_config import vlm_to_disk  # noqa: PLC0415

            return vlm_to_disk(spec)
        case PerceptionSpec():
            return perception_config(spec)
