"""Every Hugging Face architecture that our decoder supports, by its `model_type`."""

from trimaran.models.families.architecture import Family
from trimaran.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2
from trimaran.models.families.glm4_moe import GLM4_MOE
from trimaran.models.families.gpt_oss import GPT_OSS
from trimaran.models.families.llama import LLAMA
from trimaran.models.families.mixtral import MIXTRAL
from trimaran.models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE

# A spec that names no family is written as the first one here that can express it.
FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v2": DEEPSEEK_V2,
    "kimi_k2": KIMI_K2,
    "glm4_moe": GLM4_MOE,
    "gpt_oss": GPT_OSS,
}
