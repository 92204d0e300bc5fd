"""Hugging Face models without SDPA train with eager attention as plain PyTorch does, and ranks refuse together."""

import gc
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests.cases import slow
from tests.dist.test_hf import CPU, TOKENS, plan_of, unsharded
from tests.environment import CACHE
from tests.parity import assert_same_trajectory, plan_for, train_trajectory
from tests.ranks import free_port, run_ranks
from tests.unit.test_nets_hf_eager import CONFIGS, config_of
from trimaran.core import EXIT_USER, ModelSection, Plan, Recipe
from trimaran.nets import hf_network, open_hf_model
from trimaran.parallel import apply_plan, build_mesh
from trimaran.runs import RunDirectory, create_run
from trimaran.train import join_process_group, read_rank_info, run_worker

NAMES = ("gptj", "gpt_neo", "bloom", "mpt", "rwkv")
TOLERANCE = 1e-5

Gradients = dict[str, dict[str, np.ndarray]]


def config_with(name: str, vocab_size: int) -> Any:
    config = config_of(name, **CONFIGS[name])
    config.vocab_size = vocab_size
    return config


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eager")
    for name in NAMES:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config_with(name, 96)).save_pretrained(folder / name)
    return folder


def summed_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten(), reduction="sum")


def plain_gradients(folder: Path) -> Gradients:
    found = {}
    for name in NAMES:
        model = AutoModelForCausalLM.from_pretrained(folder / name, attn_implementation="eager").train()
        summed_loss(model(input_ids=TOKENS).logits, TOKENS).backward()
        found[name] = {each: tensor.grad.numpy() for each, tensor in model.named_parameters()}
    return found


def gradients_under(folder: Path, plan: Plan) -> Gradients:
    join_process_group(read_rank_info(os.environ))
    ranks, found = build_mesh(plan.mesh, device_type="cpu"), {}
    tokens = TOKENS.chunk(plan.mesh.dp)[ranks.data_rank]
    for name in NAMES:
        module, fill = open_hf_model(folder / name, trust_remote_code=False, seed=7)
        network = hf_network(module.train(), None)
        apply_plan(network, plan, ranks)
        fill(module, CPU)
        # Gradients are averaged over the data-parallel ranks.
        (summed_loss(network.forward({"tokens": tokens})[0], tokens) * plan.mesh.data).backward()
        gradients = ((each, tensor.grad) for each, tensor in module.named_parameters())
        found[name] = {each: unsharded(tensor).numpy() for each, tensor in gradients if tensor is not None}
    return found


def test_eager_models_have_the_gradients_of_plain_transformers(models: Path) -> None:
    (plain,) = run_ranks(1, plain_gradients, models)
    for gradients in run_ranks(2, gradients_under, models, plan_of({"dp_shard": 2})):
        for name in NAMES:
            assert gradients[name].keys() == plain[name].keys()
            for each, expected in plain[name].items():
                error = np.linalg.norm(gradients[name][each] - expected)
                # The small sum is for gradients that cancel to nearly 0.
                assert error <= TOLERANCE * np.linalg.norm(expected) + 1e-6, f"{name} {each}"


def recipe_of(folder: Path, name: str, texts: list[str], data: dict[str, Any], steps: int, batch: int) -> Recipe:
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    config_with(name, 320).save_pretrained(folder / "model")
    data = {"source": "jsonl", "path": str(folder / "texts.jsonl"), "seq_len": 32} | data
    train = {"steps": steps, "global_batch": batch, "lr": 3e-3, "seed": 3, "sample": {"tokens": 0}}
    model = ModelSection(family="hf", path=str(folder / "model"))
    return Recipe.model_validate({"model": model, "data": data, "train": train})


@pytest.mark.parametrize(
    ("name", "mesh", "isolate"), [("gptj", {"dp_shard": 2}, True), slow(("bloom", {"dp_replicate": 2}, False))]
)
def test_an_eager_model_trains_the_same_trajectory(
    name: str, mesh: dict[str, int], isolate: bool, tmp_path: Path
) -> None:
    texts = [f"{number} " * (1 + number * number % 23) for number in range(300)]
    recipe = recipe_of(tmp_path, name, texts, {"isolate_documents": isolate}, steps=2, batch=4)
    (tmp_path / "runs").mkdir()
    alone = train_trajectory(recipe, plan_for(recipe, grad_accum=1), tmp_path / "runs")
    trajectory = train_trajectory(recipe, plan_for(recipe, grad_accum=2, **mesh), tmp_path / "runs")
    assert_same_trajectory(trajectory, alone)
    assert trajectory.losses[-1] < trajectory.losses[0]


def train_and_exit(rank: int, port: int, path: Path, cache: Path) -> None:
    """Train a rank and end its process, which closes its connections, as that of a launcher does."""
    gc.freeze()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")  # fmt: skip
    os._exit(run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache))


@pytest.mark.parametrize("mesh", [slow({"dp_replicate": 2}), {"dp_shard": 2}], ids=str)
def test_all_ranks_end_alike_when_one_refuses(mesh: dict[str, int], tmp_path: Path) -> None:
    texts: list[str] = ["a" * 333, "b" * 333]  # one row of all holds the end of one document and the start of the other
    recipe = recipe_of(tmp_path, "mpt", texts, {"isolate_documents": True, "holdout": 0.0}, steps=40, batch=2)
    run = create_run(tmp_path / "run", recipe, plan_for(recipe, grad_accum=1, **mesh))
    context, port = multiprocessing.get_context("fork"), free_port()
    arguments = (port, run.path, CACHE)
    ranks = [context.Process(target=train_and_exit, args=(rank, *arguments)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(120.0)
        assert [rank.exitcode for rank in ranks] == [EXIT_USER, EXIT_USER]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    errors = [[each["data"] for each in map(json.loads, run.events(rank).read_text().splitlines())
               if each["kind"] == "error"] for rank in range(2)]  # fmt: skip
    assert [len(each) for each in errors] == [1, 1]
    (refused,) = [each[0] for each in errors if each[0].get("code") == "M058"]
    (lost,) = [each[0] for each in errors if each[0].get("type") == "RankLost"]
    assert refused["what"].startswith("MptForCausalLM does not keep the documents of a row apart")
    assert refused["what"] in lost["message"]
