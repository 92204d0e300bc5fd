"""The spec of any of our networks, and the config.json of each kind."""

from typing import Any

from trimaran.models.from_hf import spec_to_hf
from trimaran.models.perception_spec import PerceptionSpec, perception_config
from trimaran.models.spec import ModelSpec
from trimaran.models.to_hf_vlm import vlm_to_disk
from trimaran.models.vlm_spec import VlmSpec

Spec = ModelSpec | VlmSpec | PerceptionSpec


def disk_config(spec: Spec) -> dict[str, Any]:
    """Return the config.json of a network of this shape. Raises UserError if no format can express it."""
    match spec:
        case ModelSpec():
            return spec_to_hf(spec)
        case VlmSpec():
            return vlm_to_disk(spec)
        case PerceptionSpec():
            return perception_config(spec)
