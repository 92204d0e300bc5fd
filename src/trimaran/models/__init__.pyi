"""Public names of `trimaran.models`, and the modules that they come from. They are imported on first use."""

from .adapter_rules import (
    ALL_LINEAR as ALL_LINEAR, last_parts as last_parts, listed as listed, refuse_adapter as refuse_adapter,
    refuse_large_rank as refuse_large_rank, refuse_unknown_targets as refuse_unknown_targets, with_adapter as
    with_adapter,
)
from .any_spec import Spec as Spec, decoder_of as decoder_of, language_of as language_of, vision_of as vision_of
from .config_fields import read_json as read_json
from .families.disk_parts import DiskPart as DiskPart, HEAD as HEAD
from .from_hf import (
    disk_layout as disk_layout, is_extra_layer as is_extra_layer, spec_from_hf as spec_from_hf, spec_to_hf as
    spec_to_hf, unsupported as unsupported,
)
from .from_module import outline_from_module as outline_from_module
from .hf_facts import (
    HfFacts as HfFacts, cached_facts as cached_facts, facts_file as facts_file, facts_from_dict as facts_from_dict,
    missing_package as missing_package, refuse_ep_degree as refuse_ep_degree, refuse_seq_len as refuse_seq_len,
    refuse_tp_degree as refuse_tp_degree, write_facts as write_facts,
)
from .hf_language import EAGER_ATTENTION as EAGER_ATTENTION, FAMILY_TRAITS as FAMILY_TRAITS
from .hub_files import dataset_folder as dataset_folder, split_of_folder as split_of_folder
from .hub_names import (
    HubRepo as HubRepo, hub_error as hub_error, hub_repo_of as hub_repo_of, is_hub_name as is_hub_name, near_folder
    as near_folder, repo_name as repo_name,
)
from .model_presets import PRESETS as PRESETS, VLM_PRESETS as VLM_PRESETS
from .module_names import (
    is_named as is_named, linear_names as linear_names, linear_sizes as linear_sizes, matches_module as
    matches_module, module_names as module_names, refuse_unmatched as refuse_unmatched,
)
from .outline import (
    LinearShape as LinearShape, Opaque as Opaque, Outline as Outline, OutlineLayer as OutlineLayer, Step as Step,
    Tower as Tower, linears_of as linears_of, outline_of as outline_of, row_cost as row_cost,
)
from .outline_hf import USUAL as USUAL, VISION_OUTLINES as VISION_OUTLINES, outline_from_hf as outline_from_hf
from .perception_spec import (
    BOX_OUTPUTS as BOX_OUTPUTS, GROUPS as GROUPS, PERCEPTION_PRESETS as PERCEPTION_PRESETS, POINT_FEATURES as
    POINT_FEATURES, PerceptionSpec as PerceptionSpec, RADAR_FEATURES as RADAR_FEATURES, perception_config as
    perception_config, perception_outline as perception_outline,
)
from .plugin_family import FamilyModule as FamilyModule, build_family as build_family
from .resolve import (
    model_text as model_text, outline_for as outline_for, outline_if_known as outline_if_known, recipe_image_rules
    as recipe_image_rules, refuse_freezing as refuse_freezing,
)
from .section_spec import model_folder as model_folder, spec_of as spec_of, vlm_of as vlm_of
from .spec import (
    AttentionSpec as AttentionSpec, Block as Block, ExpertSpec as ExpertSpec, ExpertUnit as ExpertUnit, InitialRules
    as InitialRules, LatentSpec as LatentSpec, LayerSpec as LayerSpec, ModelSpec as ModelSpec, NormSpec as NormSpec,
    PLAIN_ROPE as PLAIN_ROPE, PLAIN_UNIT as PLAIN_UNIT, Rope as Rope, RouterSpec as RouterSpec, TemperatureSpec as
    TemperatureSpec, Yarn as Yarn, every_rank_has_rows as every_rank_has_rows, norm_names as norm_names,
    rows_per_rank as rows_per_rank, variations as variations,
)
from .stages import (
    cheapest_split as cheapest_split, split_by_cost as split_by_cost, split_outline as split_outline, stage_ranges
    as stage_ranges, stages_of_rank as stages_of_rank,
)
from .validate_spec import first_invalid_field as first_invalid_field
from .vlm_config import (
    FOREIGN as FOREIGN, Form as Form, disk_form as disk_form, form_of_config as form_of_config, vlm_from_disk as
    vlm_from_disk, vlm_to_disk as vlm_to_disk,
)
from .vlm_spec import (
    CHANNELS as CHANNELS, IMAGENET_MEAN as IMAGENET_MEAN, IMAGENET_STD as IMAGENET_STD, INTERNVL_CHAT as
    INTERNVL_CHAT, ImageLimits as ImageLimits, ProjectorSpec as ProjectorSpec, VisionBlock as VisionBlock,
    VisionEnds as VisionEnds, VisionSpec as VisionSpec, VlmSpec as VlmSpec, vlm_outline as vlm_outline,
)
from .weight_files import (
    BaseDigest as BaseDigest, base_difference as base_difference, base_reference as base_reference,
    compute_base_digest as compute_base_digest, file_digest as file_digest, file_identity as file_identity,
    initial_digest as initial_digest, weight_files as weight_files,
)
