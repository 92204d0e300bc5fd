import pytest

from trimaran.models import PRESETS
from trimaran.models.validate_spec import first_invalid_field

PUBLISHED = {  # distinct weights; a tied head counts once
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "phi-4": 14_659_507_200,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "command-r-35b": 34_980_831_232,
    "command-r7b": 8_028_033_024,
    "glm-4-9b": 9_400_279_040,
}


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_presets_have_the_published_number_of_parameters(name: str, published: int) -> None:
    assert PRESETS[name].num_parameters == published


def test_every_preset_is_valid_and_only_the_toys_are_unpublished() -> None:
    assert set(PRESETS) - set(PUBLISHED) == {"tiny", "tiny-moe"}
    for name, spec in PRESETS.items():
        assert spec.name == name
        assert first_invalid_field(spec) is None


def test_a_token_of_qwen3_30b_a3b_uses_three_billion_weights() -> None:
    spec = PRESETS["qwen3-30b-a3b"]
    idle = spec.layers * (spec.feed_forward_parameters - spec.active_feed_forward_parameters)
    assert spec.num_parameters - idle == 3_353_032_704
