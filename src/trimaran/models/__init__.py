"""What the network is, on paper: its shape from a preset, a Hugging Face config.json or the recipe. No torch here."""

from trimaran.models.from_hf import spec_from_hf, spec_to_hf
from trimaran.models.json_file import read_json
from trimaran.models.module_names import matches_module, module_names, refuse_unmatched
from trimaran.models.presets import PRESETS
from trimaran.models.resolve import model_folder, spec_of
from trimaran.models.spec import Block, Experts, ModelSpec, Rope
from trimaran.models.stages import split_by_cost, stage_ranges, stages_of_rank
from trimaran.models.weight_files import weight_files

__all__ = [
    "PRESETS",
    "Block",
    "Experts",
    "ModelSpec",
    "Rope",
    "matches_module",
    "model_folder",
    "module_names",
    "read_json",
    "refuse_unmatched",
    "spec_from_hf",
    "spec_of",
    "spec_to_hf",
    "split_by_cost",
    "stage_ranges",
    "stages_of_rank",
    "weight_files",
]
