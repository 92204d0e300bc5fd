"""Every Hugging Face architecture that our decoder supports, by its `model_type`."""

from trimaran.models.families.architecture import Family
from trimaran.models.families.cohere import COHERE, COHERE2
from trimaran.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2
from trimaran.models.families.gemma import GEMMA, GEMMA2, GEMMA3_TEXT
from trimaran.models.families.glm import GLM, GLM4
from trimaran.models.families.glm4_moe import GLM4_MOE
from trimaran.models.families.gpt_oss import GPT_OSS
from trimaran.models.families.llama import LLAMA, MISTRAL
from trimaran.models.families.llama4 import LLAMA4_TEXT
from trimaran.models.families.mixtral import MIXTRAL
from trimaran.models.families.olmo2 import OLMO2
from trimaran.models.families.phi3 import PHI3
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
    "llama4_text": LLAMA4_TEXT,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3_TEXT,
    "phi3": PHI3,
    "olmo2": OLMO2,
    "cohere": COHERE,
    "cohere2": COHERE2,
    "glm": GLM,
    "glm4": GLM4,
}
