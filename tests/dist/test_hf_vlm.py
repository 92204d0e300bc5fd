"""Hugging Face vision-language models: the same trajectory under every plan, and a run from images to files."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, LlavaConfig, LlavaOnevisionConfig, Qwen2VLConfig

from tests import vlm_models
from tests.cases import slow
from tests.parity import plan_for, train_trajectory
from tests.ranks import run_ranks
from tests.vlm_training import SEQ_LEN, SPEC, STEPS, TRAIN, TrainingTrace, assert_traces_match, batch_of, plan_of
from trimaran.core import ModelSection, Plan, Recipe, TrainSection
from trimaran.data import DataShare
from trimaran.models import spec_of
from trimaran.nets import HfVlmNetwork, network_of_hf, open_hf_model
from trimaran.parallel import apply_plan, build_mesh, freeze_towers
from trimaran.train import StepClock, build_stepper, join_process_group, read_rank_info

CPU = torch.device("cpu")
TEXT = vlm_models.TEXT | {"vocab_size": SPEC.vocab, "rope_scaling": vlm_models.GRID["rope_scaling"]}
TOKENS = {"image_token_id": SPEC.image_token, "vision_start_token_id": 258, "vision_end_token_id": 259}


def qwen(patch: int, **fields: Any) -> Qwen2VLConfig:
    adapter = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2, "num_heads": 2, "patch_size": patch}
    return Qwen2VLConfig(text_config=TEXT, vision_config=adapter, video_token_id=261, **TOKENS, **fields)


def llava() -> LlavaConfig:
    text = {name: value for name, value in TEXT.items() if name != "rope_scaling"} | {"model_type": "llama"}
    adapter = vlm_models.CLIP | {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8}
    return LlavaConfig(text_config=text, vision_config=adapter, image_token_index=SPEC.image_token)


def onevision() -> LlavaOnevisionConfig:
    text = {name: value for name, value in TEXT.items() if name != "rope_scaling"} | {"model_type": "qwen2"}
    tower = vlm_models.CLIP | {"model_type": "siglip_vision_model", "image_size": 20, "patch_size": 6}
    grids = [[row * 20, column * 20] for row in (1, 2) for column in (1, 2)]
    tokens = {"image_token_index": SPEC.image_token, "video_token_index": 261}
    tower["vision_use_head"] = False
    return LlavaOnevisionConfig(text_config=text, vision_config=tower, image_grid_pinpoints=grids, **tokens)


def built(folder: Path, plan: Plan, freeze: tuple[str, ...]) -> HfVlmNetwork:
    if not torch.distributed.is_initialized():
        join_process_group(read_rank_info(os.environ))
    module, fill = open_hf_model(folder, trust_remote_code=False, seed=5)
    network = network_of_hf(module, spec_of(ModelSection(family="hf", path=str(folder))))
    assert isinstance(network, HfVlmNetwork)
    freeze_towers(network, freeze)
    apply_plan(network, plan, build_mesh(plan.mesh, device_type="cpu"))
    fill(module, CPU)
    return network


def train_rank(folder: Path, plan: Plan, freeze: tuple[str, ...] = ()) -> TrainingTrace:
    """Train for a few steps. Half of the rows have no image, and in one step none has."""
    network, section = built(folder, plan, freeze), TrainSection.model_validate(TRAIN)
    ranks = build_mesh(plan.mesh, device_type="cpu")
    stepper = build_stepper((network,), section, plan, ranks, StepClock(CPU))
    stepper.set_training(True)
    share = DataShare(rank=ranks.data_rank, dp=plan.mesh.dp, micro_batch=plan.micro_batch, grad_accum=plan.grad_accum)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(stepper.step(batch_of(step, share).to(CPU))[0].item())
        norms.append(stepper.update(section.lr)[0].item())
    weights = {name: stepper.full_tensor(each).numpy().copy() for name, each in network.module.named_parameters()}
    return TrainingTrace(losses, norms, [], weights)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the config of a small model that takes the patches of tests/vlm_training.py."""
    folder = tmp_path_factory.mktemp("qwen")
    qwen(SPEC.vision.patch).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> TrainingTrace:
    return run_ranks(1, train_rank, folder, plan_of())[0]


@pytest.mark.parametrize(
    "plan",
    [
        slow(plan_of(mesh={"dp_replicate": 2})),
        plan_of(mesh={"dp_shard": 2}, sharding="parameters", recompute="full"),
        slow(plan_of(mesh={"dp_shard": 2}, sharding="optimizer", towers={"vision": {"recompute": "full"}})),
        slow(plan_of(mesh={"dp_shard": 2}, sharding="parameters", loss="fused")),
    ],
    ids=str,
)
def test_every_plan_trains_the_trajectory_of_one_process(plan: Plan, folder: Path, alone: TrainingTrace) -> None:
    assert_traces_match(run_ranks(plan.mesh.world_size, train_rank, folder, plan), alone)


def test_a_fused_loss_trains_the_same_trajectory(folder: Path, alone: TrainingTrace) -> None:
    assert_traces_match(run_ranks(1, train_rank, folder, plan_of(loss="fused")), alone)


def test_a_frozen_tower_does_not_change(folder: Path, alone: TrainingTrace) -> None:
    for trace in run_ranks(1, train_rank, folder, plan_of(), ("vision",)):
        before = built_weights(folder)
        unchanged = {name for name, each in trace.weights.items() if np.array_equal(each, before[name])}
        prefix, projector = "model.visual.", "model.visual.merger."
        frozen = {name for name in before if name.startswith(prefix) and not name.startswith(projector)}
        assert unchanged == frozen
        assert trace.losses[0] == pytest.approx(alone.losses[0], rel=1e-5)


def built_weights(folder: Path) -> dict[str, np.ndarray]:
    module, fill = open_hf_model(folder, trust_remote_code=False, seed=5)
    fill(module, CPU)
    return {name: each.detach().numpy() for name, each in module.named_parameters()}


def write_images(folder: Path) -> None:
    random = np.random.default_rng(0)
    for number in range(8):
        height, width = random.integers(24, 40, 2)
        file = folder / f"{number:02d}.png"
        Image.fromarray(random.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(file)
        file.with_suffix(".txt").write_text(f"image {number}, {width} by {height}")


@pytest.mark.parametrize("config", [partial(qwen, 4, tie_word_embeddings=True), slow(llava)], ids=["qwen", "llava"])
def test_a_run_on_images_writes_files_that_transformers_reads(config: Any, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "images").mkdir()
    write_images(tmp_path / "images")
    config().save_pretrained(tmp_path / "model")
    samples = {"min_pixels": 256, "max_pixels": 1024}
    data = {"source": "image-folder", "path": str(tmp_path / "images"), "seq_len": 2 * SEQ_LEN, "image_size": 32}
    model = ModelSection(family="hf", path=str(tmp_path / "model"))
    train = {"steps": 3, "global_batch": 4, "lr": 3e-3, "sample": {"tokens": 0}}
    tree = {"model": model, "data": data | {"samples": samples, "holdout": 0}, "train": train}
    recipe = Recipe.model_validate(tree)
    trajectory = train_trajectory(recipe, plan_for(recipe, grad_accum=2, dp_replicate=2), tmp_path / "runs")
    assert trajectory.losses[-1] < trajectory.losses[0]
    read = AutoModelForImageTextToText.from_pretrained(tmp_path / "runs" / "0" / "model", dtype=torch.float32)
    names = dict(read.named_parameters())
    assert len(names) >= len(trajectory.weights)
    assert all(torch.isfinite(each).all() for each in names.values())


@pytest.mark.slow
def test_images_of_any_resolution_train_alike_on_every_data_parallel_plan(tmp_path: Path) -> None:
    for name in ("runs", "images"):
        (tmp_path / name).mkdir()
    write_images(tmp_path / "images")
    onevision().save_pretrained(tmp_path / "model")
    data = {"source": "image-folder", "path": str(tmp_path / "images"), "seq_len": 256, "holdout": 0}
    train = {"steps": 3, "global_batch": 4, "lr": 3e-3, "sample": {"tokens": 0}, "optimizer": {"eps": 1e-3}}
    model = ModelSection(family="hf", path=str(tmp_path / "model"))
    recipe = Recipe.model_validate({"model": model, "data": data, "train": train})
    expected = train_trajectory(recipe, plan_for(recipe, grad_accum=1), tmp_path / "runs")
    assert expected.losses[-1] < expected.losses[0]
    for mesh in ({"dp_replicate": 2}, {"dp_shard": 2}):
        plan = plan_for(recipe, grad_accum=2, **mesh)
        trajectory = train_trajectory(recipe, plan, tmp_path / "runs")
        assert trajectory.losses == pytest.approx(expected.losses, rel=1e-5)
        assert trajectory.norms == pytest.approx(expected.norms, rel=1e-5)
