"""Hugging Face models under every supported axis equal one process, and no rank holds the full model."""

import json
import os
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.cases import slow
from tests.hf_models import CONFIGS, SMALL, save_model
from tests.parity import assert_same_trajectory, plan_for, train_trajectory
from tests.ranks import run_ranks
from trimaran.core import ModelSection, Plan, Recipe
from trimaran.nets.hf import HfNetwork, hf_network
from trimaran.nets.hf_build import open_hf_model
from trimaran.parallel import RankMesh, apply_plan, build_mesh
from trimaran.train.process.rank_info import join_process_group, read_rank_info

CPU = torch.device("cpu")
TOKENS = torch.arange(96).view(4, 24)
LENGTHS = [(5, 19), (10, 6, 8), (12, 12), (1, 23)]
DOCUMENTS = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS])
TOLERANCE = 1e-5
NUM_BLOCKS = 8


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live CPU tensors, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its local tensor is dispatched too
        out = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._count, (args, out))
        return out

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.device.type != "cpu" or storage in self._seen:
            return
        self._seen.add(storage)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._subtract, storage.nbytes())

    def _subtract(self, num_bytes: int) -> None:
        self.live -= num_bytes


def plan_of(mesh: dict[str, int], **fields: Any) -> Plan:
    sharding = "parameters" if "dp_shard" in mesh else "none"
    return Plan.model_validate({"mesh": mesh, "sharding": sharding, "micro_batch": 1, "grad_accum": 1} | fields)


def built(folder: Path, plan: Plan) -> tuple[HfNetwork, RankMesh]:
    join_process_group(read_rank_info(os.environ))
    ranks = build_mesh(plan.mesh, device_type="cpu")
    module, fill = open_hf_model(folder, trust_remote_code=False, seed=7)
    network = hf_network(module, None)
    apply_plan(network, plan, ranks)
    fill(module, CPU)
    return network, ranks


def unsharded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def peak_bytes(folder: Path, plan: Plan) -> int:
    with LiveBytes() as memory:
        built(folder, plan)
    return memory.peak


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model of equal blocks of 1.4 MB in `weights`, and only its config in `config`."""
    folder = tmp_path_factory.mktemp("deep")
    shape: dict[str, Any] = {
        "num_hidden_layers": NUM_BLOCKS,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "intermediate_size": 768,
    }
    config = LlamaConfig(**SMALL | shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "weights")
    config.save_pretrained(folder / "config")
    return folder


@pytest.mark.parametrize("kind", ["weights", "config"])
@pytest.mark.parametrize(
    "mesh", [{"dp_shard": 2}, slow({"dp_shard": 4}), slow({"tp": 2}), slow({"dp_shard": 2, "tp": 2})], ids=str
)
def test_no_rank_ever_holds_the_full_model(deep: Path, kind: str, mesh: dict[str, int]) -> None:
    num_bytes = (deep / "weights" / "model.safetensors").stat().st_size
    (alone,) = run_ranks(1, peak_bytes, deep / kind, plan_of({}))
    assert alone > 0.99 * num_bytes, "the measurement covers a full model"
    plan = plan_of(mesh)
    part, block = num_bytes / plan.mesh.world_size, num_bytes / NUM_BLOCKS
    for peak in run_ranks(plan.mesh.world_size, peak_bytes, deep / kind, plan):
        assert part <= peak <= part + 1.3 * block


def weights_under(folder: Path, plan: Plan) -> dict[str, np.ndarray]:
    network, _ = built(folder, plan)
    return {name: unsharded(each.detach()).numpy() for name, each in network.module.named_parameters()}


@pytest.mark.parametrize(
    ("name", "meshes"),
    [
        ("llama-tied", [{"dp_replicate": 2}, {"dp_shard": 2, "tp": 2}]),
        ("gpt2", [{"dp_shard": 2}]),
        ("qwen3-moe", [{"dp_shard": 2}]),
    ],
)
def test_random_weights_do_not_depend_on_the_plan(name: str, meshes: list[dict[str, int]], tmp_path: Path) -> None:
    CONFIGS[name].save_pretrained(tmp_path)
    (alone,) = run_ranks(1, weights_under, tmp_path, plan_of({}))
    for mesh in meshes:
        plan = plan_of(mesh)
        for weights in run_ranks(plan.mesh.world_size, weights_under, tmp_path, plan):
            assert list(weights) == list(alone)
            assert all(np.array_equal(weights[each], alone[each]) for each in alone)


def gradients_under(folder: Path, plan: Plan, packed: bool) -> dict[str, np.ndarray]:
    """Return the gradients of the summed loss."""
    network, ranks = built(folder, plan)
    local = TOKENS.chunk(plan.mesh.dp)[ranks.data_rank]
    documents = DOCUMENTS.chunk(plan.mesh.dp)[ranks.data_rank] if packed else None
    inputs: dict[str, Any] = {"tokens": local, "documents": documents}
    logits, _ = network.forward(inputs)
    assert isinstance(logits, DTensor) == (plan.mesh.tp > 1), "tp shards every vocabulary, also an odd one"
    targets = network.context.shard(local.roll(-1, 1))
    # Gradients are averaged over the data-parallel ranks.
    (F.cross_entropy(unsharded(logits).flatten(0, 1), targets.flatten(), reduction="sum") * plan.mesh.data).backward()
    return {
        name: unsharded(each.grad).numpy() for name, each in network.module.named_parameters() if each.grad is not None
    }


TP, CP = {"tp": 2}, {"cp": 2}
CASES = [
    *[(name, mesh, {}) for name in ("llama-tied", "qwen3", "gpt-neox") for mesh in (TP, CP)],
    ("gpt-neox", TP | CP, {}),
    *[slow((name, TP | CP, {})) for name in ("llama-tied", "qwen3")],
    *[("llama", mesh | {"dp_shard": 2}, {}) for mesh in (TP, CP)],
    *[(name, TP, {}) for name in ("llama-odd", "qwen2", "mistral", "gemma3")],
    *[(name, CP, {}) for name in ("gpt2", "qwen3-moe")],
    slow(("llama", TP | {"dp_replicate": 2}, {})),
    ("qwen3", CP, {"comm": {"context": "exchange"}}),
    ("qwen3", CP, {"comm": {"context": "ring"}}),
    *[slow((name, {"cp": 4}, {"comm": {"context": "ring"}})) for name in ("gpt2", "qwen3-moe")],
    ("llama", CP, {"recompute": "full"}),
    ("gemma3", TP, {"recompute": "selective"}),
]


def assert_gradients_of_one_process(folder: Path, plan: Plan, *, packed: bool) -> None:
    (alone,) = run_ranks(1, gradients_under, folder, plan_of({}), packed)
    for gradients in run_ranks(plan.mesh.world_size, gradients_under, folder, plan, packed):
        assert list(gradients) == list(alone)
        for each, expected in alone.items():
            assert np.linalg.norm(gradients[each] - expected) <= TOLERANCE * np.linalg.norm(expected), each


@pytest.mark.parametrize(("name", "mesh", "fields"), CASES, ids=str)
def test_every_axis_computes_the_gradients_of_one_process(
    name: str, mesh: dict[str, int], fields: dict[str, Any], tmp_path: Path
) -> None:
    assert_gradients_of_one_process(save_model(name, tmp_path), plan_of(mesh, **fields), packed=True)


@pytest.mark.parametrize("mesh", [TP, CP], ids=str)
def test_a_sequence_of_one_document_needs_no_mask(mesh: dict[str, int], tmp_path: Path) -> None:
    assert_gradients_of_one_process(save_model("llama", tmp_path), plan_of(mesh), packed=False)


def test_compiled_blocks_compute_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = partial(nn.Module.compile, backend="aot_eager")  # without kernels, which take a minute to compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiled(self))
    assert_gradients_of_one_process(save_model("llama", tmp_path), plan_of({"dp_shard": 2}, compile=True), packed=True)


def test_the_gradients_change_with_documents_and_with_another_model(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "one")
    save_model("llama-tied", tmp_path / "other")
    folders = [(tmp_path / "one", False), (tmp_path / "one", True), (tmp_path / "other", True)]
    norms = [run_ranks(1, gradients_under, folder, plan_of({}), packed)[0] for folder, packed in folders]
    totals = [sum(np.linalg.norm(each) for each in gradients.values()) for gradients in norms]
    assert min(abs(a - b) for a, b in ((totals[0], totals[1]), (totals[1], totals[2]))) > 1e-3 * totals[0]


def saved_under(folder: Path, plan: Plan) -> dict[str, np.ndarray]:
    network, _ = built(folder, plan)
    return {name: each.numpy() for name, each in network.disk_tensors()}


@pytest.mark.parametrize("name", ["llama-tied", "gemma3", "gpt-neox"])
def test_a_sharded_model_is_saved_as_it_was_read(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    before = load_file(tmp_path / "model.safetensors")
    for after in run_ranks(4, saved_under, tmp_path, plan_of({"dp_shard": 2, "tp": 2})):
        assert before.keys() == after.keys()
        assert all(np.array_equal(after[each], tensor.numpy()) for each, tensor in before.items())


@pytest.mark.parametrize("mesh", [TP, CP], ids=str)
def test_a_hugging_face_model_trains_the_same_trajectory(mesh: dict[str, int], tmp_path: Path) -> None:
    with (tmp_path / "uneven.jsonl").open("w") as file:
        for number in range(300):
            file.write(json.dumps({"text": f"{number} " * (1 + number * number % 23)}) + "\n")
    LlamaConfig(**SMALL | {"vocab_size": 320}, tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    data = {"source": "jsonl", "path": str(tmp_path / "uneven.jsonl"), "seq_len": 32, "isolate_documents": True}
    train = {"steps": 3, "global_batch": 8, "lr": 3e-3, "seed": 3, "sample": {"tokens": 0}}
    model = ModelSection(family="hf", path=str(tmp_path / "model"))
    recipe = Recipe.model_validate({"model": model, "data": data, "train": train})
    (tmp_path / "runs").mkdir()
    alone = train_trajectory(recipe, plan_for(recipe, grad_accum=1), tmp_path / "runs")
    trajectory = train_trajectory(recipe, plan_for(recipe, grad_accum=2, **mesh), tmp_path / "runs")
    assert_same_trajectory(trajectory, alone)
    assert trajectory.losses[-1] < trajectory.losses[0]
