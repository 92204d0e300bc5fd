"""The shipped case studies parse, and their networks have the sizes that are computed by hand here."""

from pathlib import Path

import pytest

from trimaran.app import read_question
from trimaran.models import Outline
from trimaran.planner import Question

CASES = Path(__file__).parents[2] / "recipes" / "case-studies"
RECIPES = sorted(CASES.glob("*.yaml"))


def study(name: str) -> Question:
    """Return the planner's question of a case study."""
    return read_question(str(CASES / f"{name}.yaml"), [])


def outline(name: str) -> Outline:
    found = study(name).outline
    assert found is not None
    return found


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_case_study_has_its_files_name_and_finds_its_cluster_from_any_folder(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    question = study(path.stem)
    recipe, max_seq_len = question.recipe, outline(path.stem).max_seq_len
    assert recipe.name == path.stem
    assert recipe.plan == "auto"
    assert recipe.train.global_batch % question.cluster.world_size == 0
    assert not max_seq_len or recipe.data.seq_len <= max_seq_len
    assert recipe.model.path is None or Path(recipe.model.path).is_absolute(), "the ranks may run elsewhere"


def test_the_llamas_are_7_13_and_69_billion() -> None:
    for name, layers, hidden, kv_width, ffn in [
        ("7b-one-80gb", 32, 4096, 4096, 11008),
        ("llama-13b-4xa100-40gb", 40, 5120, 5120, 13824),
        ("70b-8xa100-80gb", 80, 8192, 1024, 28672),
        ("70b-4xa100-80gb", 80, 8192, 1024, 28672),
        ("70b-2xa100-80gb", 80, 8192, 1024, 28672),
    ]:
        layer = 2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * ffn + 2 * hidden
        assert outline(name).num_parameters == layers * layer + 2 * 32000 * hidden + hidden


def test_the_vlm_has_a_vision_tower_of_5_and_a_half_billion_and_a_language_model_of_20_billion() -> None:
    vision, projector, language = outline("vlm-26b-8xh100").towers
    # A layer of InternViT-6B: two norms, query and key norms, two scales, and biases except for query, key and value.
    vision_layer = 4 * 3200**2 + 2 * 3200 * 12800 + 6 * 3200 + 3200 + 12800 + 3200
    patches = 3 * 14 * 14 * 3200 + 3200 + 3200 + (32 * 32 + 1) * 3200
    assert vision.parameters == 45 * vision_layer + patches == 5_536_496_000
    language_layer = 2 * 6144**2 + 2 * 6144 * 1024 + 3 * 6144 * 16384 + 2 * 6144
    assert language.parameters == 48 * language_layer + 2 * 92553 * 6144 + 6144 == 19_861_260_288
    assert projector.parameters == 12800 * 6144 + 6144 * 6144 + 2 * 12800 + 2 * 6144
    assert (vision.positions, vision.segment, projector.positions) == (5 * 1025, 1025, 5 * 256)


def test_gpt3_is_175_billion() -> None:
    network = outline("gpt3-175b-64xa100-80gb")
    layer = 12 * 12288**2 + 13 * 12288
    assert network.num_parameters == 96 * layer + (51200 + 2048) * 12288 + 2 * 12288 == 174_615_846_912
    assert network.max_seq_len == 2048


def test_the_detector_is_10_billion() -> None:
    recipe, network = study("vit-10b-detection-8xa100-40gb").recipe, outline("vit-10b-detection-8xa100-40gb")
    layer = 12 * 4096**2 + 13 * 4096
    places = 32 * 54 + 1 + 100
    stem = 3 * 16 * 16 * 4096 + 4096 + 101 * 4096 + 2 * 4096
    head = 4 * (4096 + 1) * 4096 + (92 + 4) * (4096 + 1)
    assert network.num_parameters == 48 * layer + 48 * places * 4096 + stem + head
    assert network.num_parameters / 1e9 == pytest.approx(10.1, abs=0.05)
    assert network.main.sample_positions(recipe.data.seq_len) == (places, places)
    assert recipe.data.seq_len == places
