"""Every Hugging Face architecture that our decoder supports, by its `model_type`."""

from trimaran.models.families.architecture import Family
from trimaran.models.families.llama import LLAMA
from trimaran.models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE

# A spec that names no family is written as the first one here that can express it.
FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
}
