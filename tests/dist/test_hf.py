"""Hugging Face models under every supported axis equal one process, and no rank holds the full model."""

import json
import os
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.cases import slow
from tests.hf_models import CONFIGS, SMALL, save_model
from tests.parity import assert_same_trajectory, plan_for, train_trajectory
from tests.ranks import run_ranks
from trimaran.core import ModelSection, Plan, Recipe
from trimaran.nets import HfNetwork, hf_network, open_hf_model
from trimaran.parallel import RankMesh, apply_plan, build_mesh
from trimaran.train import join_process_group, read_rank_info

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
    if not dist.is_initialized():
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


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [
        ({"dp_shard": 2}, "weights"),
        slow(({"dp_shard": 2}, "config")),
        *[slow((mesh, "weights")) for mesh in ({"dp_shard": 4}, {"tp": 2}, {"dp_shard": 2, "tp": 2})],
    ],
    ids=str,
)
def test_no_rank_ever_holds_the_full_model(deep: Path, mesh: dict[str, int], kind: str) -> None:
    num_bytes = (deep / "weights" / "model.safetensors").stat().st_size
    (alone,) = run_ranks(1, peak_bytes, deep / kind, plan_of({}))
    assert alone > 0.99 * num_bytes, "the measurement covers a full model"
    plan = plan_of(mesh)
    part, block = num_bytes / plan.mesh.world_size, num_bytes / NUM_BLOCKS
    for peak in run_ranks(plan.mesh.world_size, peak_bytes, deep / kind, plan):
        assert part <= peak <= part + 1.3 * block


class Case(NamedTuple):
    """A model under a plan, with several documents in each row if `packed`."""

    name: str
    mesh: dict[str, int]
    fields: dict[str, Any] | None = None
    packed: bool = True


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a folder of each model, with weights."""
    folder = tmp_path_factory.mktemp("models")
    for name in sorted({each.name for each in (*TWO_RANKS, *FOUR_RANKS)}):
        save_model(name, folder / name)
    return folder


def weights_under(root: Path, cases: list[Case]) -> list[dict[str, np.ndarray]]:
    found = []
    for case in cases:
        network, _ = built(root / case.name, plan_of(case.mesh))
        found.append({name: unsharded(each.detach()).numpy() for name, each in network.module.named_parameters()})
    return found


INITIALISED = [
    *[Case(name, {"dp_shard": 2}) for name in ("llama-tied", "gpt2", "qwen3-moe")],
    Case("llama-tied", {"tp": 2}),
]


@pytest.mark.parametrize(
    "cases", [INITIALISED, slow([Case("llama-tied", {"dp_shard": 2, "tp": 2})])], ids=["2 ranks", "4 ranks"]
)
def test_random_weights_do_not_depend_on_the_plan(cases: list[Case], tmp_path: Path) -> None:
    for case in cases:
        CONFIGS[case.name].save_pretrained(tmp_path / case.name)
    (alone,) = run_ranks(1, weights_under, tmp_path, [Case(each.name, {}) for each in cases])
    for rank in run_ranks(plan_of(cases[0].mesh).mesh.world_size, weights_under, tmp_path, cases):
        for case, ours, theirs in zip(cases, rank, alone, strict=True):
            assert list(ours) == list(theirs), case
            assert [each for each in theirs if not np.array_equal(ours[each], theirs[each])] == [], case


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


def gradients_of(root: Path, cases: list[Case]) -> list[dict[str, np.ndarray]]:
    return [gradients_under(root / each.name, plan_of(each.mesh, **each.fields or {}), each.packed) for each in cases]


TP, CP = {"tp": 2}, {"cp": 2}
TWO_RANKS = [
    *[Case(name, TP) for name in ("llama-tied", "llama-odd", "qwen3", "gpt-neox", "gpt2")],  # GPT-2 packs projections
    *[Case(name, CP) for name in ("gpt2", "gpt-neox", "qwen3-moe")],
    Case("gemma3", TP, {"recompute": "selective"}),
    Case("qwen3-moe", {"dp_shard": 2, "ep": 2}),  # stacked experts
    Case("qwen3-moe", TP),
    Case("llama", CP, {"recompute": "full"}),
    *[Case("qwen3", CP, {"comm": {"context": each}}) for each in ("exchange", "ring")],
    *[Case("llama", mesh, packed=False) for mesh in (TP, CP)],  # which need no mask
]
FOUR_RANKS = [
    *[Case(name, TP | CP) for name in ("gpt-neox", "llama-tied", "qwen3")],
    *[Case("llama", mesh | {"dp_shard": 2}) for mesh in (TP, CP)],
    Case("llama", TP | {"dp_replicate": 2}),
    *[Case(name, {"cp": 4}, {"comm": {"context": "ring"}}) for name in ("gpt2", "qwen3-moe")],
]


@pytest.fixture(scope="module")
def alone(models: Path) -> dict[tuple[str, bool], dict[str, np.ndarray]]:
    """Return the gradients of each model in one process, by its name and whether rows are packed."""
    cases = [Case(folder.name, {}) for folder in models.iterdir()] + [Case("llama", {}, packed=False)]
    (gradients,) = run_ranks(1, gradients_of, models, cases)
    return {(case.name, case.packed): each for case, each in zip(cases, gradients, strict=True)}


@pytest.mark.parametrize("cases", [TWO_RANKS, slow([FOUR_RANKS])], ids=["2 ranks", "4 ranks"])
def test_every_axis_computes_the_gradients_of_one_process(
    cases: list[Case], models: Path, alone: dict[tuple[str, bool], dict[str, np.ndarray]]
) -> None:
    wrong = []
    for rank in run_ranks(plan_of(cases[0].mesh).mesh.world_size, gradients_of, models, cases):
        for case, gradients in zip(cases, rank, strict=True):
            expected = alone[case.name, case.packed]
            assert list(gradients) == list(expected), case
            off = {each: np.linalg.norm(gradients[each] - expected[each]) for each in expected}
            wrong += [(case, each) for each in off if not off[each] <= TOLERANCE * np.linalg.norm(expected[each])]
    assert wrong == []


def test_the_gradients_change_with_documents_and_with_another_model(
    alone: dict[tuple[str, bool], dict[str, np.ndarray]],
) -> None:
    cases = (("llama", False), ("llama", True), ("llama-tied", True))
    totals = [sum(np.linalg.norm(each) for each in alone[case].values()) for case in cases]
    assert min(abs(a - b) for a, b in ((totals[0], totals[1]), (totals[1], totals[2]))) > 1e-3 * totals[0]


@pytest.mark.slow  # the compiler takes a minute
def test_compiled_blocks_compute_the_same(models: Path, alone: dict[tuple[str, bool], dict[str, np.ndarray]]) -> None:
    case = Case("llama", {"dp_shard": 2}, {"compile": True})
    for (gradients,) in run_ranks(2, gradients_of, models, [case], timeout=400):
        for name, expected in alone["llama", True].items():
            assert np.linalg.norm(gradients[name] - expected) <= TOLERANCE * np.linalg.norm(expected), name


def saved_under(folders: list[Path], plan: Plan) -> list[dict[str, np.ndarray]]:
    return [{name: each.numpy() for name, each in built(folder, plan)[0].disk_tensors()} for folder in folders]


@pytest.mark.parametrize("mesh", [TP, slow({"dp_shard": 2, "tp": 2})], ids=str)
def test_a_sharded_model_is_saved_as_it_was_read(mesh: dict[str, int], models: Path) -> None:
    folders, plan = [models / name for name in ("llama-tied", "gemma3", "gpt-neox")], plan_of(mesh)
    for rank in run_ranks(plan.mesh.world_size, saved_under, folders, plan):
        for folder, after in zip(folders, rank, strict=True):
            before = load_file(folder / "model.safetensors")
            assert before.keys() == after.keys(), folder.name
            wrong = [each for each, tensor in before.items() if not np.array_equal(after[each], tensor.numpy())]
            assert wrong == [], folder.name


@pytest.mark.parametrize("mesh", [TP, slow(CP), slow({"dp_shard": 2})], ids=str)
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
