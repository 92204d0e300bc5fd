"""The shape of any network of ours."""

from trimaran.models.perception_spec import PerceptionSpec
from trimaran.models.spec import ModelSpec
from trimaran.models.vlm_spec import VlmSpec

Spec = ModelSpec | VlmSpec | PerceptionSpec
