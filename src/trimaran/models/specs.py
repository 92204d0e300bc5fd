"""The shape of any network of ours."""

from trimaran.models.perception import PerceptionSpec
from trimaran.models.spec import ModelSpec
from trimaran.models.vlm import VlmSpec

Spec = ModelSpec | VlmSpec | PerceptionSpec
