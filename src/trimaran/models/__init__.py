"""The shape of a network, from a preset, a Hugging Face config.json or the recipe. Imports no torch."""

from trimaran.models.adapted_outline import with_adapter
from trimaran.models.any_spec import Spec, disk_config
from trimaran.models.from_hf import spec_from_hf, spec_to_hf
from trimaran.models.hf_vision import ImageLimits
from trimaran.models.json_file import read_json
from trimaran.models.layer_adapter import LayerAdapter, LinearShape
from trimaran.models.layer_variations import AttentionSpec, Ends, NormSpec
from trimaran.models.model_presets import PRESETS
from trimaran.models.module_names import matches_module, module_names, refuse_unmatched
from trimaran.models.outline import Latent, Opaque, Outline, OutlineLayer, Step, Tower, outline_of
from trimaran.models.outline_hf import outline_from_hf
from trimaran.models.perception_spec import PERCEPTION_PRESETS, PerceptionSpec
from trimaran.models.resolve import model_folder, outline_for, outline_if_known, outline_named, refuse_freezing, spec_of
from trimaran.models.rope import Rope
from trimaran.models.spec import Block, ExpertSpec, LayerSpec, ModelSpec
from trimaran.models.stages import split_by_cost, split_outline, stage_ranges, stages_of_rank
from trimaran.models.vlm_outline import vlm_outline
from trimaran.models.vlm_presets import VLM_PRESETS
from trimaran.models.vlm_spec import ProjectorSpec, VisionSpec, VlmSpec
from trimaran.models.weight_files import weight_files

__all__ = [
    "PERCEPTION_PRESETS",
    "PRESETS",
    "VLM_PRESETS",
    "AttentionSpec",
    "Block",
    "Ends",
    "ExpertSpec",
    "ImageLimits",
    "Latent",
    "LayerAdapter",
    "LayerSpec",
    "LinearShape",
    "ModelSpec",
    "NormSpec",
    "Opaque",
    "Outline",
    "OutlineLayer",
    "PerceptionSpec",
    "ProjectorSpec",
    "Rope",
    "Spec",
    "Step",
    "Tower",
    "VisionSpec",
    "VlmSpec",
    "disk_config",
    "matches_module",
    "model_folder",
    "module_names",
    "outline_for",
    "outline_from_hf",
    "outline_if_known",
    "outline_named",
    "outline_of",
    "read_json",
    "refuse_freezing",
    "refuse_unmatched",
    "spec_from_hf",
    "spec_of",
    "spec_to_hf",
    "split_by_cost",
    "split_outline",
    "stage_ranges",
    "stages_of_rank",
    "vlm_outline",
    "weight_files",
    "with_adapter",
]
