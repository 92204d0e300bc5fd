"""The spec of any of our networks, and the config.json of each kind."""

from typing import Any

from trimaran.models.perception_spec import PerceptionSpec, perception_config
from trimaran.models.spec import ModelSpec
from trimaran.models.vlm_spec import VlmSpec

Spec = ModelSpec | VlmSpec | PerceptionSpec


def disk_config(spec: Spec) -> dict[str, Any]:
    """Return the config.json of a network of this shape. Raises UserError if no format can express it."""
    match spec:
        case ModelSpec():
            from trimaran.models.from_hf import spec_to_hf  # noqa: PLC0415

            return spec_to_hf(spec)
        case VlmSpec():
            from trimaran.models.to_hf_vlm import vlm_to_disk  # noqa: PLC0415

            return vlm_to_disk(spec)
        case PerceptionSpec():
            return perception_config(spec)
